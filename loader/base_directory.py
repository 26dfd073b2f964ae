"""A base's module table from its files: `config.json` and safetensors headers, no weights, no torch.

A header says that `…q_proj.weight` is [out, in]; it does not say whether that is a linear, an
embedding or a transposed Conv1D, nor which modules exist only by sharing another one's weight. What
is missing is knowledge about model families, kept here as data. A family that is not listed is
refused rather than guessed: a wrong table would be noticed late, as a digest that no worker has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterd.loader.base_model import (
    EXPERTS_PART,
    BaseModule,
    ModuleKind,
    invalid,
    parse_json,
    read_file,
    stack_path,
    without_experts_inside,
)
from adapterd.loader.errors import Code, error

MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_HEADER_BYTES = 100_000_000
"""The cap of the safetensors library itself (`MAX_HEADER_SIZE`)."""

_LIVE = "Make the table from the live model instead: BaseSpec.from_module (a meta device is enough)."

EMBEDDING_PARTS = frozenset(
    {
        "embed_tokens", "embed_positions", "shared", "wte", "wpe", "relative_attention_bias",
        "word_embeddings", "position_embeddings", "token_type_embeddings",
    }
)  # fmt: skip
_CONV1D_PARTS = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Dtypes whose stored shape is the shape; integers are packed somehow."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the headers of a model type do not say.

    Attributes:
        prefix: the attribute under which models with a head keep the bare model.
        conv1d: last name parts that are transformers' Conv1D.
        head: the output head's path in models for language modelling.
    """

    prefix: str = "model"
    conv1d: frozenset[str] = frozenset()
    head: str = "lm_head"


_DECODER = Family()
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(
        (
            "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
            "gemma3_text", "phi", "phi3", "opt", "olmo", "olmo2", "granite", "cohere", "stablelm",
            "starcoder2", "smollm3",
        ),
        _DECODER,
    ),
    "gpt2": Family("transformer", _CONV1D_PARTS),
    "gptj": Family("transformer"),
    "bloom": Family("transformer"),
    "falcon": Family("transformer"),
    "t5": Family(""),
    "mt5": Family(""),
    "bert": Family("bert", head="cls.predictions.decoder"),
    "roberta": Family("roberta", head="lm_head.decoder"),
    "xlm-roberta": Family("roberta", head="lm_head.decoder"),
    "distilbert": Family("distilbert", head="vocab_projector"),
}  # fmt: skip

_HEADED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")


@dataclass(frozen=True, slots=True)
class _Config:
    architecture: str
    model_type: str
    family: Family
    tied: bool | None

    @property
    def bare(self) -> bool:
        return self.architecture.endswith("Model") and not self.architecture.endswith("LMHeadModel")

    @property
    def headed(self) -> bool:
        return self.architecture.endswith(_HEADED)


def modules_of_directory(path: Path) -> Iterable[BaseModule]:
    """All modules of the model in `path`, in no order.

    Raises:
        NotFound: PATH_NOT_FOUND for a folder, config or weights that cannot be read.
        Failed: BASE_TABLE_INVALID for malformed files and for what headers cannot decide.
    """
    if not path.is_dir():
        raise error(Code.PATH_NOT_FOUND, str(path), "is not a folder")
    config = _read_config(path / "config.json")
    weights = {_live_name(config, name): shape for name, shape in _weights(path)}
    found = {m.path: m for m in _stored_modules(config, weights)}
    found |= dict(_shared_embeddings(found))
    found |= dict(_tied_head(config, found))
    return without_experts_inside(found)


def _read_config(path: Path) -> _Config:
    body = parse_json(read_file(path, MAX_CONFIG_BYTES), path.name)
    names, kind, tied = body.get("architectures"), body.get("model_type"), body.get("tie_word_embeddings")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise invalid("config.json.architectures", "must name the model's one class")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise invalid("config.json.model_type", f"no rules for the model type {str(kind)[:40]!r}", _LIVE)
    return _Config(names[0], kind, FAMILIES[kind], tied if isinstance(tied, bool) else None)


def _weights(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name (without `.weight`) and shape of all that may be a module's; stacked experts have no `.weight`."""
    for file in _weight_files(path):
        for name, info in _header(file).items():
            if name.endswith(".qweight"):
                raise invalid(name[:200], "the checkpoint is quantised and its shapes are packed", _LIVE)
            if name.endswith(".weight") or f".{EXPERTS_PART}." in name:
                yield name.removesuffix(".weight"), _shape(name, info)


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return [path / "model.safetensors"]
    listed = parse_json(read_file(index, MAX_INDEX_BYTES), index.name).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(v, str) for v in listed.values()):
        raise invalid(index.name, "has no weight_map of names to files")
    names = sorted(set(listed.values()))
    if any("/" in n or "\\" in n or n in {"", ".", ".."} for n in names):
        raise invalid(index.name, "names a file outside the folder")
    return [path / name for name in names]


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= MAX_HEADER_BYTES:
                raise invalid(path.name, f"a header of {length} bytes")
            data = file.read(length)
    except OSError as e:
        hint = "Pickled weights are never opened; convert them to safetensors."
        raise error(Code.PATH_NOT_FOUND, str(path), f"cannot be read: {e.strerror or e}", hint) from e
    if len(data) != length:
        raise invalid(path.name, "ends inside its header")
    return parse_json(data, path.name)


def _shape(name: str, info: object) -> tuple[int, ...]:
    where = name[:200]
    if not isinstance(info, dict) or not isinstance(info.get("shape"), list):
        raise invalid(where, "has no shape")
    shape = info["shape"]
    if any(type(d) is not int or d < 0 for d in shape):
        raise invalid(where, "has a shape that is not a list of sizes")
    if len(shape) == 2 and info.get("dtype") not in _PLAIN_DTYPES:
        raise invalid(where, f"is {str(info.get('dtype'))[:20]}: a packed dtype hides the module's shape", _LIVE)
    return tuple(shape)


def _live_name(config: _Config, name: str) -> str:
    """The name in the live model: some files hold the body of a model with a head bare, or the reverse."""
    prefix = f"{config.family.prefix}." if config.family.prefix else ""
    if not prefix or config.family is _DECODER:
        return name
    if config.bare:
        return name.removeprefix(prefix)
    body = name.split(".", 1)[0] in {"h", "wte", "wpe", "word_embeddings", "embeddings", "encoder", "pooler"}
    return prefix + name if body else name


def _stored_modules(config: _Config, weights: Mapping[str, tuple[int, ...]]) -> Iterator[BaseModule]:
    for path, shape in weights.items():
        parts = path.split(".")
        last = parts[-1]
        if EXPERTS_PART in parts[:-1] or last == EXPERTS_PART:
            stack = stack_path(".".join(parts[: parts.index(EXPERTS_PART) + 1]))
            yield BaseModule(stack, ModuleKind.EXPERTS, 0, 0)
        elif len(shape) != 2:
            continue
        elif last in EMBEDDING_PARTS:
            yield BaseModule(path, ModuleKind.EMBEDDING, shape[0], shape[1])
        elif last in config.family.conv1d:
            yield BaseModule(path, ModuleKind.CONV1D, shape[0], shape[1])
        else:
            yield BaseModule(_beside_stack(path), ModuleKind.LINEAR, shape[1], shape[0])


def _beside_stack(path: str) -> str:
    """The router moves along with its stack, so that it is recognised as one."""
    return stack_path(path) if path.endswith(".block_sparse_moe.gate") else path


def _shared_embeddings(found: Mapping[str, BaseModule]) -> Iterator[tuple[str, BaseModule]]:
    """Encoder-decoders store `shared` once and use it under two more names."""
    for path, module in found.items():
        parent, _, last = path.rpartition(".")
        if last != "shared" or module.kind is not ModuleKind.EMBEDDING:
            continue
        for half in ("encoder", "decoder"):
            alias = f"{parent}.{half}.embed_tokens".removeprefix(".")
            if alias not in found and any(p.startswith(alias.removesuffix("embed_tokens")) for p in found):
                yield alias, BaseModule(alias, ModuleKind.EMBEDDING, module.in_features, module.out_features)


def _tied_head(config: _Config, found: Mapping[str, BaseModule]) -> Iterator[tuple[str, BaseModule]]:
    """The output head of a language model, if it is in no file because it shares the input embedding."""
    head = config.family.head
    if not config.headed or head in found:
        return
    if config.tied is False:
        raise invalid(head, "no file holds the output head, and config.json says that it is not tied", _LIVE)
    inputs = {
        (m.in_features, m.out_features)
        for m in found.values()
        if m.path.rpartition(".")[2] in {"embed_tokens", "shared", "wte", "word_embeddings"}
    }
    if len(inputs) != 1:
        raise invalid(head, f"the tied head's shape is not clear: {len(inputs)} kinds of input embedding", _LIVE)
    rows, width = inputs.pop()
    yield head, BaseModule(head, ModuleKind.LINEAR, width, rows)
