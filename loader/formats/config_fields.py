"""The fields of `adapter_config.json` that must not decide anything here: ignorable, refused, unknown.

Together with `SUPPORTED` the tables name every field of PEFT's LoraConfig (0.21.2); a test compares
them with the installed PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from adapterd.loader.errors import Code, Problem, Refused, error, warn
from adapterd.loader.formats.config_values import bad_type, bad_value, kind_of, unsupported
from adapterd.loader.formats.text import shown

SUPPORTED = frozenset({
    "peft_type", "base_model_name_or_path", "revision", "task_type", "r", "lora_alpha", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "use_rslora",
    "fan_in_fan_out", "bias", "modules_to_save", "init_lora_weights",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ignorable:
    """A field that never changes what is computed at inference.

    Attributes:
        types: of its value besides null.
        tell: whether a value that says something is worth a warning, as its author may expect an effect.
    """

    types: tuple[type, ...]
    tell: bool = False


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that would change what is computed: refused unless null or one of `values`.

    Attributes:
        types: where given, another type is refused as such: "false" is a string, and true to PEFT.
    """

    values: tuple[Any, ...] = ()
    types: tuple[type, ...] | None = None


IGNORABLE: Mapping[str, Ignorable] = {
    "inference_mode": Ignorable((bool,)),
    "lora_dropout": Ignorable((int, float)),
    "peft_version": Ignorable((str,)),
    "auto_mapping": Ignorable((dict,)),
    "qalora_group_size": Ignorable((int,)),
    "runtime_config": Ignorable((dict,), tell=True),
    # Recipes for A and B at the start of training, and for memory during it.
    "loftq_config": Ignorable((dict,), tell=True),
    "eva_config": Ignorable((dict,), tell=True),
    "corda_config": Ignorable((dict,), tell=True),
    "lora_ga_config": Ignorable((dict,), tell=True),
    "velora_config": Ignorable((dict,), tell=True),
}

REFUSED_UNLESS: Mapping[str, Neutral] = {
    "use_dora": Neutral((False,), (bool,)),
    "use_qalora": Neutral((False,), (bool,)),
    "lora_bias": Neutral((False,), (bool,)),
    "ensure_weight_tying": Neutral((False,), (bool,)),
    "megatron_config": Neutral(({},)),
    # Older PEFT imports the module that is named here.
    "megatron_core": Neutral(("megatron.core",), (str,)),
    "trainable_token_indices": Neutral(([], {})),
    "alora_invocation_tokens": Neutral(),
    "layer_replication": Neutral(([],)),
    "target_parameters": Neutral(([],)),
    "use_bdlora": Neutral((False,)),
    "arrow_config": Neutral(),
    "kasa_config": Neutral(),
    "monteclora_config": Neutral(),
}

# Where PEFT's own auto_mapping points; anything else is told, and never imported either.
_KNOWN_LIBRARIES = frozenset({"transformers", "peft"})


def other_fields_problems(fields: Mapping[str, Any]) -> list[Problem]:
    """What is to say about all fields but the values of the supported ones, in a fixed order."""
    problems: list[Problem] = []
    for check in _checks(fields):
        try:
            found = check()
        except Refused as refusal:
            problems += refusal.problems
        else:
            problems += [found] if found is not None else []
    return problems


def _checks(fields: Mapping[str, Any]) -> Iterator[Callable[[], Problem | None]]:
    yield partial(_layers_beside_regex, fields)
    for name, neutral in REFUSED_UNLESS.items():
        yield partial(_refused_unless, name, fields.get(name), neutral)
    for name, ignorable in IGNORABLE.items():
        yield partial(_ignored, name, fields.get(name), ignorable)
    for name in sorted(fields.keys() - SUPPORTED - IGNORABLE.keys() - REFUSED_UNLESS.keys()):
        yield partial(_unknown, name, fields[name])


def _layers_beside_regex(fields: Mapping[str, Any]) -> None:
    """As LoraConfig.__post_init__ does."""
    layers, pattern = fields.get("layers_to_transform"), fields.get("layers_pattern")
    if isinstance(fields.get("target_modules"), str) and (layers is not None or pattern is not None):
        bad_value("layers_to_transform", "cannot stand beside a target_modules that is a regex")
    if pattern and layers is None:
        bad_value("layers_pattern", "has no meaning without layers_to_transform")


def _refused_unless(name: str, value: object, rule: Neutral) -> None:
    if value is None:
        return
    if rule.types is not None and type(value) not in rule.types:
        bad_type(name, value, " or ".join(["null", *(kind_of(v) for v in rule.values)]))
    if not any(type(value) is type(v) and value == v for v in rule.values):
        unsupported(name, value)


def _ignored(name: str, value: object, rule: Ignorable) -> Problem | None:
    if value is None:
        return None
    if type(value) not in rule.types:
        bad_type(name, value, " or ".join(["null", *(kind_of(t()) for t in rule.types)]))
    if name == "auto_mapping":
        return _auto_mapping(value)
    if rule.tell and _says_something(value):
        return warn(Code.CONFIG_IGNORED_FIELD, name, f"{shown(value, 60)} has no effect on serving; ignored")
    return None


def _auto_mapping(value: object) -> Problem | None:
    library = value.get("parent_library") if isinstance(value, dict) else None
    if value == {} or (isinstance(library, str) and library.split(".")[0] in _KNOWN_LIBRARIES):
        return None
    return warn(Code.CONFIG_IGNORED_FIELD, "auto_mapping", f"{shown(value, 80)} is not imported; ignored")


def _says_something(value: object) -> bool:
    """Whether anything in `value` differs from null, false and empty."""
    if isinstance(value, dict):
        return any(_says_something(v) for v in value.values())
    if isinstance(value, list):
        return any(_says_something(v) for v in value)
    return value is not None and value is not False and value != ""


def _unknown(name: str, value: object) -> Problem:
    where = shown(name)
    if value is None or value is False or value in ("", [], {}):
        return warn(Code.CONFIG_IGNORED_FIELD, where, f"unknown field, {kind_of(value)} that says nothing; ignored")
    raise error(
        Code.UNSUPPORTED_FEATURE, where, f"unknown field: {shown(value, 60)} may change what is computed",
        "Remove the field if it is only a note.",
    )  # fmt: skip
