"""PEFT's names for tensors, read into a closed union.

PEFT saves `base_model.model.<module>.lora_A.weight` and `….lora_B.weight`, the adapter's own name
taken out (`peft.utils.save_and_load.get_peft_model_state_dict`). Everything else in a file is a
feature beyond A and B, a spelling that PEFT would not load, or nothing that PEFT knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from adapterd.loader.errors import Code, Problem, reject
from adapterd.loader.formats.text import shown

PREFIX = "base_model.model."
Side = Literal["A", "B"]

_SAVE_AGAIN = "Save the adapter with PEFT's save_pretrained."
_CONVERT = f"{_SAVE_AGAIN} Or: `adapterctl convert DIR --base BASE --out DIR2` writes a copy with the right names."
_TRAIN_WITHOUT = "Train without it, or merge it into a base of its own."
_EXPORT = "Export it as PEFT safetensors; docs/convert.md says how."
_HEAD = (
    "If it was trained, merge the adapter (merge_and_unload, save_pretrained) and register the result as a base. "
    "If it was not, save again with modules_to_save=None and save_pretrained(DIR, save_embedding_layers=False)."
)
# How a feature looks that the config need not mention: PEFT, and people, add such tensors on their own.
_FEATURE_WORDS = {
    "modules_to_save": (
        "a whole head or embedding rides along, which the config does not mention; only A and B are served",
        _HEAD,
    ),
    "bias": (
        "a bias of the base rides along, which the config does not mention (bias is 'none'); only A and B are served",
        "If it was trained, merge the adapter into a base of its own; if not, save again with bias='none'.",
    ),
    "use_dora": (
        "a magnitude of DoRA rides along, which the config does not mention; served without it, outputs would differ",
        "Train with use_dora=False, or merge the adapter into a base of its own.",
    ),
}


@dataclass(frozen=True, slots=True)
class LoraKey:
    """One factor of one module: A [rank, in_features] or B [out_features, rank]."""

    name: str
    module: str
    side: Side


@dataclass(frozen=True, slots=True)
class FeatureKey:
    """A tensor of a feature that is not plain LoRA; `feature` is PEFT's word for it."""

    name: str
    module: str
    feature: str


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """A LoRA tensor whose module path carries a wrapper's prefix, or lacks PEFT's."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A tensor that PEFT does not load into an adapter. `logical`: the key that it may be a spelling of."""

    name: str
    message: str
    logical: LoraKey | None = None
    hint: str = _SAVE_AGAIN


TensorKey: TypeAlias = LoraKey | FeatureKey | PrefixKey | UnknownKey

_LORA: tuple[tuple[str, Side], ...] = ((".lora_A.weight", "A"), (".lora_B.weight", "B"))
_FEATURES: tuple[tuple[str, str], ...] = (
    (".lora_A.bias", "lora_bias"),
    (".lora_B.bias", "lora_bias"),
    (".lora_magnitude_vector", "use_dora"),
    (".lora_magnitude_vector.weight", "use_dora"),
    (".lora_embedding_A", "embedding"),
    (".lora_embedding_B", "embedding"),
    (".token_adapter.trainable_tokens_delta", "trainable_token_indices"),
    (".trainable_tokens_delta", "trainable_token_indices"),
    (".modules_to_save.weight", "modules_to_save"),
    (".modules_to_save.bias", "modules_to_save"),
    (".original_module.weight", "modules_to_save"),
    (".original_module.bias", "modules_to_save"),
    (".base_layer.weight", "save_embedding_layers"),
    (".base_layer.bias", "bias"),
    (".bias", "bias"),
)
# Modules that PEFT saves whole without being told: classification heads (`SEQ_CLS_HEAD_NAMES`, and
# DistilBERT's second layer, which `classifier` takes along), and the embeddings of a resized vocabulary
# (`EMBEDDING_LAYER_NAMES`).
_SAVED_WHOLE = frozenset({"score", "classifier", "pre_classifier", "qa_outputs", "lm_head", "embed_tokens", "wte"})
# Parts that torch's wrappers put into names: anywhere, or only in front, where a base may call its own part so.
INNER_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
OUTER_WRAPPERS = INNER_WRAPPERS | {"module"}
_WRAPPER_NAMES = {
    "_orig_mod": "torch.compile", "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing", "module": "DataParallel",
}  # fmt: skip


def classify(name: str) -> TensorKey:
    """What the tensor called `name` is. `name` has passed the header's grammar of names."""
    if not name.startswith(PREFIX):
        return _without_prefix(name)
    path = name[len(PREFIX) :]
    if path.startswith(PREFIX):
        return PrefixKey(name, f"the prefix {PREFIX!r} stands there twice")
    for segment in path.split("."):
        if segment in INNER_WRAPPERS:
            return PrefixKey(name, f"'{segment}' is the wrapper of {_WRAPPER_NAMES[segment]}, not a module of the base")
    return _classify_path(name, path)


def _classify_path(name: str, path: str) -> TensorKey:
    for suffix, side in _LORA:
        if path.endswith(suffix):
            return _lora(name, path[: -len(suffix)], side)
    for suffix, feature in _FEATURES:
        if path.endswith(suffix):
            return FeatureKey(name, path[: -len(suffix)], feature)
    module, _, leaf = path.rpartition(".")
    if leaf == "weight" and module.rpartition(".")[2] in _SAVED_WHOLE:
        return FeatureKey(name, module, "modules_to_save")
    return _unknown(name, path)


def _lora(name: str, module: str, side: Side) -> TensorKey:
    parts = module.split(".")
    if not module:
        return UnknownKey(name, "no module stands between the prefix and lora_" + side)
    if "base_layer" in parts:
        return FeatureKey(name, module, "target_parameters")
    if any(p.startswith("lora_") for p in parts):
        return UnknownKey(name, "a LoRA tensor of a LoRA tensor")
    return LoraKey(name, module, side)


def _unknown(name: str, path: str) -> UnknownKey:
    parts = path.split(".")
    if len(parts) >= 4 and parts[-1] == "weight" and parts[-3] in ("lora_A", "lora_B"):
        side: Side = "A" if parts[-3] == "lora_A" else "B"
        logical = LoraKey(name, ".".join(parts[:-3]), side)
        return UnknownKey(name, f"the adapter's name {shown(parts[-2], 40)!r} stands in the key", logical, _CONVERT)
    if parts[-1] in ("lora_A", "lora_B"):
        return UnknownKey(name, f"{parts[-1]} without '.weight' is not how PEFT saves LoRA")
    if foreign := _foreign(name):
        return foreign
    if parts[-1] == "alpha":
        return UnknownKey(name, "PEFT keeps alpha in adapter_config.json; this tensor would be ignored")
    if parts[-1] == "weight":
        return UnknownKey(name, "a whole weight of the base; an adapter must not bring it along")
    return UnknownKey(name, "not the name of a LoRA tensor")


def _foreign(name: str) -> UnknownKey | None:
    """The names of other tools, where one knows them."""
    parts = name.split(".")
    if parts[-1] in ("lora_a", "lora_b"):
        message = "lora_a and lora_b are MLX's names; its factors are transposed and its scale is not alpha/r"
        return UnknownKey(name, message, hint=_EXPORT)
    if "lora_down" in parts or "lora_up" in parts or parts[0].startswith(("lora_te", "lora_unet")):
        message = "a name of Kohya's format (lora_down, lora_up, alpha as a tensor); PEFT's are lora_A and lora_B"
        return UnknownKey(name, message, hint=_EXPORT)
    return None


def _without_prefix(name: str) -> TensorKey:
    if foreign := _foreign(name):
        return foreign
    if not any(mark in name for mark in (".lora_A.", ".lora_B.", ".lora_embedding_", ".lora_magnitude_vector")):
        return UnknownKey(name, f"not the name of a LoRA tensor: those start with {PREFIX!r}")
    first = name.partition(".")[0]
    if PREFIX in name and first in _WRAPPER_NAMES:
        return PrefixKey(name, f"'{first}.' in front comes from {_WRAPPER_NAMES[first]}")
    return PrefixKey(name, f"the prefix {PREFIX!r} is missing")


def key_problem(key: FeatureKey | PrefixKey | UnknownKey) -> Problem:
    """The refusal that a key other than A or B stands for."""
    where = shown(key.name)
    match key:
        case FeatureKey():
            plain = f"a tensor of {key.feature}; only plain LoRA is served", _TRAIN_WITHOUT
            return reject(Code.UNSUPPORTED_FEATURE, where, *_FEATURE_WORDS.get(key.feature, plain))
        case PrefixKey():
            return reject(Code.KEY_PREFIX, where, key.message, _CONVERT)
        case UnknownKey():
            return reject(Code.UNKNOWN_KEY, where, key.message, key.hint)
