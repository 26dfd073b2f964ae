"""The supported fields of `adapter_config.json`: one reader each, from any JSON value to a strict type.

A reader takes the field's name, for the refusal, and its value. Types are strict: PEFT takes "false"
for true and true for 1, and a server that does the same computes something else than was trained.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.pattern_table import PatternTable
from adapterd.loader.formats.regex import compile_part, compile_target
from adapterd.loader.formats.text import shown
from adapterd.loader.limits import Limits

T = TypeVar("T")

ALL_LINEAR = "all-linear"
# What PEFT makes of layers_pattern (see targets.py). Lazy, so that the first number in a name counts and not
# that of an expert.
LAYER_TEMPLATE = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
# Largest finite float32: the scaling is applied in float32.
MAX_ALPHA = 3.4028234663852886e38
MAX_NAME_CHARS = 512
MAX_LAYER_PATTERNS = 8

TASK_TYPES = ("CAUSAL_LM", "FEATURE_EXTRACTION", "QUESTION_ANS", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS")
# Ways to initialise A and B that leave the base's weights alone: the saved A and B are the whole adapter.
PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
# These change the base's weights when the adapter is loaded.
BASE_CHANGING_INITS = re.compile(r"pissa(?:_niter_\d+)?|olora|corda|loftq|lora_ga", re.IGNORECASE)


def missing(name: str, _: object) -> NoReturn:
    """For a field that is not there, or null, or empty."""
    raise error(
        Code.CONFIG_MISSING_FIELD, name, "the config does not say it, and a default would be a guess",
        "Take adapter_config.json as PEFT's save_pretrained wrote it.",
    )  # fmt: skip


def bad_type(name: str, value: object, wanted: str) -> NoReturn:
    """Raises Refused (CONFIG_BAD_TYPE)."""
    found = shown(value, 60)
    raise error(Code.CONFIG_BAD_TYPE, shown(name), f"{found} is {kind_of(value)}; wanted is {wanted}")


def bad_value(name: str, message: str) -> NoReturn:
    """Raises Refused (CONFIG_BAD_VALUE)."""
    raise error(Code.CONFIG_BAD_VALUE, shown(name), message)


def unsupported(name: str, value: object) -> NoReturn:
    """Raises Refused (UNSUPPORTED_FEATURE)."""
    raise error(
        Code.UNSUPPORTED_FEATURE, shown(name), f"{shown(value, 60)} is more than plain LoRA",
        "Train without it, or merge the adapter into a base of its own.",
    )  # fmt: skip


def kind_of(value: object) -> str:
    """JSON's word for the type of `value`, with its article."""
    words = {bool: "a boolean", int: "an integer", float: "a fraction", str: "a string", list: "a list"}
    return "null" if value is None else words.get(type(value), "a table")


def text(name: str, value: object) -> str:
    if value is None or value == "":
        missing(name, value)
    if not isinstance(value, str):
        bad_type(name, value, "a string")
    return value


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        bad_type(name, value, "true or false")
    return value


def integer(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        bad_type(name, value, "an integer")
    return value


def rank(limits: Limits) -> Callable[[str, object], int]:
    def read(name: str, value: object) -> int:
        found = integer(name, value)
        if found < 1:
            bad_value(name, f"a rank of {shown(found, 40)}; it must be at least 1")
        if found > limits.max_rank:
            raise error(Code.RANK_TOO_LARGE, shown(name), f"a rank of {shown(found, 40)}, at most {limits.max_rank}")
        return found

    return read


def alpha(name: str, value: object) -> float:
    """Any finite float32, negative and zero too: what those mean is judged with the rank."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        bad_type(name, value, "a number")
    if abs(value) > MAX_ALPHA:
        bad_value(name, f"{shown(value, 40)} does not fit a float32")
    return float(value)


def task_type(name: str, value: object) -> str:
    found = text(name, value)
    if found not in TASK_TYPES:
        bad_value(name, f"{shown(found, 60)!r} is none of {', '.join(TASK_TYPES)}")
    return found


def bias(name: str, value: object) -> str:
    found = text(name, value)
    if found in ("all", "lora_only"):
        unsupported(name, found)
    if found != "none":
        bad_value(name, f"{shown(found, 60)!r} is none of none, all, lora_only")
    return found


def init(name: str, value: object) -> bool | str:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        bad_type(name, value, "true, false or a string")
    if BASE_CHANGING_INITS.fullmatch(value):
        raise error(
            Code.UNSUPPORTED_FEATURE, name, f"{shown(value, 60)!r} changes the base's weights at load",
            "save_pretrained(path_initial_model_for_weight_conversion=...) writes it as a plain adapter.",
        )  # fmt: skip
    if value.lower() not in PLAIN_INITS:
        bad_value(name, f"unknown initialisation {shown(value, 60)!r}")
    return value


def names(name: str, value: object, limits: Limits) -> tuple[str, ...]:
    """Distinct names in stored order."""
    entries = _strings(name, value)
    if len(entries) > limits.max_tensors:
        bad_value(name, f"{len(entries)} entries, at most {limits.max_tensors}")
    for entry in entries:
        if not entry or len(entry) > MAX_NAME_CHARS:
            bad_value(name, f"the entry {shown(entry, 60)!r} is no module's name")
    return tuple(dict.fromkeys(entries))


def names_or_regex(limits: Limits) -> Callable[[str, object], tuple[str, ...] | str]:
    def read(name: str, value: object) -> tuple[str, ...] | str:
        if not isinstance(value, str):
            return names(name, value, limits)
        if value:
            compile_target(value, name)
        return value or ()

    return read


def targets(limits: Limits) -> Callable[[str, object], tuple[str, ...] | str]:
    def read(name: str, value: object) -> tuple[str, ...] | str:
        if value is None:
            bad_value(name, "null would make PEFT guess the modules from the architecture; name them")
        if isinstance(value, str) and value.lower() == ALL_LINEAR:
            return value
        found = names_or_regex(limits)(name, value)
        if not found:
            bad_value(name, "no module is named")
        return found

    return read


def layers(name: str, value: object) -> tuple[int, ...] | None:
    """Layer numbers; an empty list means all layers to PEFT, like null."""
    numbers = value if isinstance(value, list) else [value]
    found = tuple(dict.fromkeys(integer(name, n) for n in numbers))
    if any(n < 0 for n in found):
        bad_value(name, "a layer number is below 0")
    return found or None


def layers_pattern(name: str, value: object) -> tuple[str, ...]:
    patterns = _strings(name, [value] if isinstance(value, str) else value)
    if len(patterns) > MAX_LAYER_PATTERNS:
        bad_value(name, f"{len(patterns)} patterns, at most {MAX_LAYER_PATTERNS}")
    for entry in patterns:
        compile_part(entry, LAYER_TEMPLATE, name, captures=True)
    return tuple(p for p in patterns if p)


def pattern(
    limits: Limits, read_number: Callable[[str, object], T]
) -> Callable[[str, object], tuple[tuple[str, T], ...]]:
    """`rank_pattern` and `alpha_pattern`: a table from regexes to numbers, its order kept."""

    def read(name: str, value: object) -> tuple[tuple[str, T], ...]:
        if not isinstance(value, dict):
            bad_type(name, value, "a table from patterns to numbers")
        if len(value) > limits.max_modules:
            bad_value(name, f"{len(value)} patterns, at most {limits.max_modules}")
        PatternTable(list(value), name)
        return tuple((key, read_number(f"{name}.{shown(key, 60)}", number)) for key, number in value.items())

    return read


def modules_to_save(name: str, value: object) -> tuple[str, ...]:
    """Whole modules beside A and B: never served; an empty list means none, like null."""
    entries = _strings(name, value)
    if entries:
        unsupported(name, sorted(set(entries)))
    return ()


def _strings(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        bad_type(name, value, "a list of strings")
    return value
