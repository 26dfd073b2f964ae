"""Which part of an adapter one rank of a tensor-parallel group holds (I21).

Shards follow the base layer. A column-parallel linear holds some of its outputs: A is whole on every rank, B is
cut along out_features. A row-parallel one holds some of its inputs: A is cut along in_features, B is whole, and
the delta is partial, as the layer's own output is before its reduction. What no rule names is replicated: every
rank holds both matrices and computes the same delta.

The rank of an adapter is never cut, so it may be smaller than the group. Verification is of the whole adapter,
against the whole base's table: only packing takes slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.identity import canonical_json, sha256_hex

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec

Axis = Literal["column", "row"]
Ranges = tuple[tuple[int, int], ...]
"""[begin, end) of features, ascending and apart."""
MAX_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Rule:
    """How linears of one name are cut.

    Attributes:
        name: a module's path, or its end at a dot (`q_proj`).
        axis: `column` cuts the outputs, `row` the inputs.
        slices: how many there are; a divisor of the number of ranks. Where it is smaller, neighbouring ranks hold
            the same slice: key and value heads, when there are fewer of them than ranks.
        groups: features of parts that are each cut by themselves, where the base packs several linears into one
            module and adapters know that module only; empty for one part.
    """

    name: str
    axis: Axis
    slices: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of one linear that a rank holds: inputs (columns of A) and outputs (rows of B)."""

    inputs: Ranges
    outputs: Ranges

    @property
    def in_features(self) -> int:
        return _length(self.inputs)

    @property
    def out_features(self) -> int:
        return _length(self.outputs)


def _whole(where: str, *numbers: object) -> None:
    """Neither 2.0 nor True is one: they compare equal to whole numbers, and are not written like them."""
    for number in numbers:
        if type(number) is not int:
            raise _invalid(where, f"{number!r} is no whole number", "")


@dataclass(frozen=True)
class Sharding:
    """What rank `rank` of `size` holds. Immutable; equal ones cut alike.

    Attributes:
        rules: by name; of several that fit a path, the longest name counts.
    """

    rank: int = 0
    size: int = 1
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        """Raises Failed (SETTINGS_INVALID)."""
        _whole("rank", self.rank, self.size)
        if not 0 <= self.rank < self.size <= MAX_RANKS:
            raise _invalid("rank", f"{self.rank} of {self.size} ranks, of which there may be {MAX_RANKS}", "")
        for rule in self.rules:
            self._check_rule(rule)
        if len(self._by_name) != len(self.rules):
            raise _invalid("rules", "a name stands there twice", "Give one rule a name.")

    def _check_rule(self, rule: Rule) -> None:
        if rule.axis not in {"column", "row"} or not rule.name:
            raise _invalid(rule.name, f"axis {rule.axis!r} is neither column nor row", "")
        _whole(rule.name, rule.slices, *rule.groups)
        if rule.slices < 1 or self.size % rule.slices:
            raise _invalid(
                rule.name, f"{rule.slices} slices for {self.size} ranks",
                "Each slice is held by equally many ranks: their number is a divisor of the number of ranks.",
            )  # fmt: skip
        if any(width < 1 for width in rule.groups):
            raise _invalid(rule.name, f"groups {rule.groups}", "Give the features of each part.")

    @classmethod
    def of(cls, rank: int, size: int, *, column: Iterable[str] = (), row: Iterable[str] = ()) -> Self:
        """Plain rules: every rank holds a slice of its own.

        Raises:
            Failed: SETTINGS_INVALID.
        """
        columns = [Rule(name, "column", size) for name in column]
        return cls(rank, size, (*columns, *(Rule(name, "row", size) for name in row)))

    @cached_property
    def _by_name(self) -> dict[str, Rule]:
        return {rule.name: rule for rule in self.rules}

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex); equal for equal ones only. Quicker to compare than hundreds of rules."""
        rules = [[r.name, r.axis, r.slices, list(r.groups)] for r in self.rules]
        return sha256_hex(canonical_json([self.rank, self.size, rules]))

    def rule(self, path: str) -> Rule | None:
        """The rule of a module, or None: it is replicated."""
        name = path
        while name:
            if name in self._by_name:
                return self._by_name[name]
            name = name.partition(".")[2]
        return None

    def cut(self, path: str, in_features: int, out_features: int) -> Cut:
        """What this rank holds of the module at `path`, whose widths are those of the whole.

        Raises:
            Failed: SETTINGS_INVALID if it cannot be cut evenly.
        """
        rule = self.rule(path)
        whole = Cut(((0, in_features),), ((0, out_features),))
        if rule is None:
            return whole
        if rule.axis == "column":
            return Cut(whole.inputs, self._ranges(rule, path, out_features))
        return Cut(self._ranges(rule, path, in_features), whole.outputs)

    def _ranges(self, rule: Rule, path: str, features: int) -> Ranges:
        if rule.groups and sum(rule.groups) != features:
            raise _invalid(path, f"groups of {sum(rule.groups)} features in all, the module has {features}", "")
        index = self.rank * rule.slices // self.size
        return joined(_slices(rule, path, features, index))

    def check(self, base: BaseSpec) -> None:
        """Whether every linear of the base can be cut as the rules say, and every rule names one.

        Raises:
            Failed: SETTINGS_INVALID, naming the module or the rule.
        """
        unused = set(self._by_name)
        for module in base.modules:
            rule = self.rule(module.path)
            if rule is None:
                continue
            unused.discard(rule.name)
            if module.kind not in {"linear", "conv1d"}:
                raise _invalid(
                    module.path, f"is of kind {module.kind.value}; only linears can be cut",
                    "Leave it out: adapters of embeddings and of experts are not served, with shards or without.",
                )  # fmt: skip
            self.cut(module.path, module.in_features, module.out_features)
        if unused:
            raise _invalid(
                sorted(unused)[0], f"this rule fits no module of {base.id}", "Take the names from the base's table."
            )


WHOLE = Sharding()
"""One rank, which holds everything."""


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """`ranges`, ascending and apart, with those that touch made one."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            begin = found.pop()[0]  # noqa: PLW2901
        found.append((begin, end))
    return tuple(found)


def _slices(rule: Rule, path: str, features: int, index: int) -> Iterator[tuple[int, int]]:
    offset = 0
    for group in rule.groups or (features,):
        if group % rule.slices:
            raise _invalid(
                path, f"{group} features cannot be cut into {rule.slices} equal slices",
                "Uneven shards are not served. Use a number of ranks that divides it, or fewer `slices`, or leave "
                "this module out of the rules and replicate it.",
            )  # fmt: skip
        part = group // rule.slices
        yield offset + index * part, offset + (index + 1) * part
        offset += group


def _length(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)


def _invalid(where: str, message: str, hint: str) -> AdapterdError:
    return error(Code.SETTINGS_INVALID, f"sharding: {where}", message, hint)
