"""What the worker runs: a model directory, or the built-in tiny model, and the way from text to tokens and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from torch import nn

TINY = "tiny"
TINY_ID = "adapterd/tiny-llama"
TINY_REVISION = "0" * 40
_BYTES = 256
_UNFINISHED = "\ufffd"


class Text(Protocol):
    """A tokenizer, as far as the worker needs one."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """The tiny model's tokens: a token a byte of UTF-8."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of `text`."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; bytes that are no text become U+FFFD."""
        return bytes(tokens).decode("utf-8", "replace")


class _Tokenizer:
    """One of transformers'."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Sequence[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class TextStream:
    """The text of one answer, in pieces that never have half a character."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._told = 0

    def piece(self, token: int) -> str:
        """What `token` adds; empty while a character is unfinished."""
        self._tokens.append(token)
        whole = self._text.decode(self._tokens)
        if whole.endswith(_UNFINISHED):
            return ""
        told, self._told = self._told, len(whole)
        return whole[told:]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its device. `text` is None if the directory has no tokenizer; `stop` ends an answer."""

    model: nn.Module
    text: Text | None
    stop: frozenset[int]


def load_model(name: str, device: str) -> Loaded:
    """The tiny model, or the one in the folder `name`. Nothing is downloaded, and no code of the folder runs.

    Raises:
        NotFound: PATH_NOT_FOUND. Failed: SETTINGS_INVALID. Unavailable: DEVICE_ERROR.
    """
    loaded = Loaded(tiny_model(), Bytes(), frozenset()) if name == TINY else _from_folder(Path(name))
    try:
        loaded.model.to(device)
    except (RuntimeError, AssertionError) as fault:  # torch without CUDA asserts
        raise error(Code.DEVICE_ERROR, device, f"the model cannot be put there: {_first_line(fault)}") from fault
    return loaded


def tiny_model() -> nn.Module:
    """A Llama of 0.1 million seeded random weights: 2 layers, hidden size 64, 512 positions, a token a byte."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_BYTES, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model: nn.Module = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.15)
    return model.eval().requires_grad_(False)


def _from_folder(folder: Path) -> Loaded:
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise error(
            Code.PATH_NOT_FOUND, str(folder), "there is no model directory with a config.json",
            f"Name a local directory of a causal language model, or `{TINY}`.",
        )  # fmt: skip
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, dtype="auto", **options)
    except (OSError, ValueError, ImportError, KeyError) as fault:
        raise error(
            Code.SETTINGS_INVALID, str(folder), f"transformers cannot load it: {_first_line(fault)}",
            "The weights must be safetensors files, of a class that transformers has.",
        ) from fault  # fmt: skip
    return Loaded(model.eval().requires_grad_(False), _tokenizer(folder, options), _stop_tokens(model))


def _tokenizer(folder: Path, options: dict[str, Any]) -> Text | None:
    if not ((folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file()):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, ImportError, KeyError) as fault:
        message = f"transformers cannot load its tokenizer: {_first_line(fault)}"
        raise error(Code.SETTINGS_INVALID, str(folder), message) from fault
    return _Tokenizer(tokenizer)


def _stop_tokens(model: Any) -> frozenset[int]:
    given = getattr(model.generation_config, "eos_token_id", None)
    if given is None:
        return frozenset()
    return frozenset(given if isinstance(given, list) else [given])


def _first_line(fault: BaseException) -> str:
    return next(iter(str(fault).splitlines()), type(fault).__name__)[:200]
