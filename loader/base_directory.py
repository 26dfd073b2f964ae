"""A base's module table from its files: `config.json` and safetensors headers, no weights, no torch.

A header says that `…q_proj.weight` is [out, in]; it does not say whether that is a linear, an
embedding or a transposed Conv1D, nor which modules exist only by sharing another one's weight. What
is missing is knowledge about model families, kept here as data. What is not in there is `Undecided`,
and not guessed: a wrong table would be noticed late, as a digest that no worker has. It is then for the
class that the config names to say (`base_meta`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterd.loader.base_fields import invalid
from adapterd.loader.base_files import StoredTensor, read_config, stored_tensors
from adapterd.loader.base_model import EXPERTS_PART, BaseModule, ModuleKind, stack_path, without_experts_inside
from adapterd.loader.formats.text import shown

EMBEDDING_PARTS = frozenset(
    {
        "embed_tokens", "embed_positions", "shared", "wte", "wpe", "relative_attention_bias",
        "word_embeddings", "position_embeddings", "token_type_embeddings",
    }
)  # fmt: skip
_CONV1D_PARTS = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Dtypes whose stored shape is the shape; integers are packed somehow."""
_COUNTING_DTYPES = frozenset({"I64", "BOOL"})
"""Of positions and masks, which some models store beside their weights. Nobody packs into these."""


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


class Undecided(Exception):
    """What headers do not say about this model.

    Attributes:
        where, reason: the place, and why.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


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
    """All modules of the model in `path`, in no order; by the headers or, where they do not say, by its class.

    Raises:
        NotFound: PATH_NOT_FOUND for a folder, config or weights that cannot be read.
        Failed: BASE_TABLE_INVALID for malformed files, and where neither way gives a table.
    """
    from adapterd.loader.base_meta import modules_of_class

    config, stored = read_config(path), tuple(stored_tensors(path))
    try:
        return tuple(modules_of_headers(config, stored))
    except Undecided as undecided:
        return modules_of_class(config, stored, undecided)


def modules_of_headers(body: Mapping[str, Any], stored: Iterable[StoredTensor]) -> Iterable[BaseModule]:
    """All modules, by `config.json` and the tensors' names and shapes alone.

    Raises:
        Undecided: this takes the model's class.
        Failed: BASE_TABLE_INVALID for a malformed config, and for a head that is nowhere.
    """
    config = _parsed(body)
    weights = {_live_name(config, name): shape for name, shape in _weights(stored)}
    found = {m.path: m for m in _stored_modules(config, weights)}
    found |= dict(_shared_embeddings(found))
    found |= dict(_tied_head(config, found))
    return without_experts_inside(found)


def architecture_of(body: Mapping[str, Any]) -> str:
    """The model's one class. Raises Failed (BASE_TABLE_INVALID)."""
    names = body.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise invalid("config.json.architectures", "must name the model's one class")
    return names[0]


def _parsed(body: Mapping[str, Any]) -> _Config:
    architecture = architecture_of(body)
    kind, tied = body.get("model_type"), body.get("tie_word_embeddings")
    if not isinstance(kind, str):
        raise invalid("config.json.model_type", "must name the model's type")
    if kind not in FAMILIES:
        raise Undecided("config.json.model_type", f"no rules for the model type '{shown(kind, 40)}'")
    if body.get("quantization_config") is not None:
        raise Undecided("config.json.quantization_config", "the weights are quantised and their shapes may be packed")
    return _Config(architecture, kind, FAMILIES[kind], tied if isinstance(tied, bool) else None)


def _weights(stored: Iterable[StoredTensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name (without `.weight`) and shape of all that may be a module's; stacked experts have no `.weight`."""
    for tensor in stored:
        weight = tensor.name.endswith(".weight")
        fine = PLAIN_DTYPES if weight else PLAIN_DTYPES | _COUNTING_DTYPES
        if len(tensor.shape) == 2 and tensor.dtype not in fine:
            reason = f"is {shown(tensor.dtype, 20)}: a packed dtype hides the module's shape"
            raise Undecided(shown(tensor.name), reason)
        if weight or f".{EXPERTS_PART}." in tensor.name:
            yield tensor.name.removesuffix(".weight"), tensor.shape


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
        hint = "Is a shard missing?"
        raise invalid(head, "no file holds the output head, and config.json says that it is not tied", hint)
    inputs = {
        (m.in_features, m.out_features)
        for m in found.values()
        if m.path.rpartition(".")[2] in {"embed_tokens", "shared", "wte", "word_embeddings"}
    }
    if len(inputs) != 1:
        raise Undecided(head, f"the tied head's shape is not clear: {len(inputs)} kinds of input embedding")
    rows, width = inputs.pop()
    yield head, BaseModule(head, ModuleKind.LINEAR, width, rows)
