"""`adapter_config.json` into a frozen type, every field of PEFT's LoraConfig (0.21.2) known by name.

A field is supported (it decides what is computed; read here by `config_values`), ignorable (it never
does at inference), or refused unless it has its neutral value (`config_fields`). An unknown field with
a neutral value is ignored with a warning; one that says something is refused: nothing is dropped
silently (I4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from adapterd.loader.errors import Code, Problem, Refused, error, error_from
from adapterd.loader.formats import config_values as values
from adapterd.loader.formats.config_fields import other_fields_problems
from adapterd.loader.formats.json_strict import JsonRules, parse_object
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import CONFIG_FILE
from adapterd.loader.limits import Limits

T = TypeVar("T")
D = TypeVar("D")

ALL_LINEAR = values.ALL_LINEAR
# LoraConfig has 45 fields; more than this is no config.
MAX_FIELDS = 512

NamesOrRegex = tuple[str, ...] | str


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What `adapter_config.json` says about a plain LoRA adapter.

    Attributes:
        base_model_name: as written; only ever compared, never opened.
        revision: of the base; None where the config does not say.
        target_modules: names (exact, or a suffix at a dot), or one string: a regex for the whole name, or
            `all-linear`.
        exclude_modules: likewise; empty for none.
        layers_to_transform: layer numbers, or None for all.
        layers_pattern: names of the lists of layers that those numbers count; empty for any.
        r, lora_alpha: for modules that no pattern names.
        rank_pattern, alpha_pattern: (regex, value) in stored order; the first that matches holds.
        modules_to_save, bias: always empty and `none` in what `parse_config` returns.
    """

    peft_type: str
    base_model_name: str
    revision: str | None
    task_type: str | None
    target_modules: NamesOrRegex
    exclude_modules: NamesOrRegex
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    fan_in_fan_out: bool
    bias: str
    modules_to_save: tuple[str, ...]
    init_lora_weights: bool | str

    @property
    def all_linear(self) -> bool:
        """PEFT compares the shorthand without case."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR


def parse_config(data: bytes, limits: Limits) -> tuple[PeftConfig, tuple[Problem, ...]]:
    """The config and the warnings about it.

    Raises:
        Refused: CONFIG_*, UNSUPPORTED_PEFT_TYPE, UNSUPPORTED_FEATURE, RANK_TOO_LARGE; all that were found.
    """
    fields = parse_object(data, _rules(limits))
    if len(fields) > MAX_FIELDS:
        raise error(Code.CONFIG_TOO_LARGE, CONFIG_FILE, f"{len(fields)} fields, at most {MAX_FIELDS}")
    _check_peft_type(fields)
    reader = _Reader(fields)
    config = reader.read(limits)
    problems = [*reader.problems, *other_fields_problems(fields)]
    if any(p.severity == "reject" for p in problems):
        raise error_from(problems)
    return config, tuple(problems)


def _rules(limits: Limits) -> JsonRules:
    return JsonRules(
        where=CONFIG_FILE,
        max_bytes=limits.max_config_bytes,
        max_depth=limits.max_json_depth,
        max_values=limits.max_config_bytes,
        invalid=Code.CONFIG_NOT_JSON,
        duplicate=Code.CONFIG_DUPLICATE_KEY,
        too_deep=Code.CONFIG_TOO_DEEP,
        too_large=Code.CONFIG_TOO_LARGE,
        too_many=Code.CONFIG_TOO_LARGE,
        bad_number=Code.CONFIG_BAD_VALUE,
    )


def _check_peft_type(fields: Mapping[str, Any]) -> None:
    """First of all: the fields of another method mean other things."""
    kind = fields.get("peft_type")
    if kind is None:
        raise error(
            Code.CONFIG_MISSING_FIELD, "peft_type", "the config does not say which PEFT method it is for",
            "Is this the adapter_config.json that PEFT's save_pretrained wrote?",
        )  # fmt: skip
    if not isinstance(kind, str):
        values.bad_type("peft_type", kind, "a string")
    if kind != "LORA":
        raise error(
            Code.UNSUPPORTED_PEFT_TYPE, "peft_type", f"{shown(kind, 60)!r} is not served, only 'LORA' is",
            "Train with peft.LoraConfig, or merge the adapter into a base of its own.",
        )  # fmt: skip


class _Reader:
    """Reads the supported fields in a fixed order, and gathers what is wrong with any."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.problems: list[Problem] = []

    def read(self, limits: Limits) -> PeftConfig:
        """The config; only worth something where no problem rejects."""
        return PeftConfig(
            peft_type="LORA",
            base_model_name=self._required("base_model_name_or_path", values.text, ""),
            revision=self._optional("revision", values.text, None),
            task_type=self._optional("task_type", values.task_type, None),
            target_modules=self._required("target_modules", values.targets(limits), ()),
            exclude_modules=self._optional("exclude_modules", values.names_or_regex(limits), ()),
            layers_to_transform=self._optional("layers_to_transform", values.layers, None),
            layers_pattern=self._optional("layers_pattern", values.layers_pattern, ()),
            r=self._required("r", values.rank(limits), 1),
            lora_alpha=self._required("lora_alpha", values.alpha, 1.0),
            use_rslora=self._given("use_rslora", values.flag, False),
            rank_pattern=self._optional("rank_pattern", values.pattern(limits, values.rank(limits)), ()),
            alpha_pattern=self._optional("alpha_pattern", values.pattern(limits, values.alpha), ()),
            fan_in_fan_out=self._given("fan_in_fan_out", values.flag, False),
            bias=self._given("bias", values.bias, "none"),
            modules_to_save=self._optional("modules_to_save", values.modules_to_save, ()),
            init_lora_weights=self._given("init_lora_weights", values.init, True),
        )

    def _required(self, name: str, read: Callable[[str, Any], T], fallback: D) -> T | D:
        """A field that PEFT would fill in silently, or guess, where it is missing."""
        return self._read(name, read if name in self._fields else values.missing, fallback)

    def _optional(self, name: str, read: Callable[[str, Any], T], default: D) -> T | D:
        """A field that may be missing or null."""
        return default if self._fields.get(name) is None else self._read(name, read, default)

    def _given(self, name: str, read: Callable[[str, Any], T], default: D) -> T | D:
        """A field that may be missing, but has its type where it is there."""
        return self._read(name, read, default) if name in self._fields else default

    def _read(self, name: str, read: Callable[[str, Any], T], fallback: D) -> T | D:
        try:
            return read(name, self._fields.get(name))
        except Refused as refusal:
            self.problems += refusal.problems
            return fallback
