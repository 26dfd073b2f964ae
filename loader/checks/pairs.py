"""From the names in the header to one pair of A and B a module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from adapterd.loader.checks.findings import Findings, several
from adapterd.loader.errors import Code, Problem, reject
from adapterd.loader.formats.tensor_names import (
    PREFIX,
    FeatureKey,
    LoraKey,
    PrefixKey,
    TensorKey,
    UnknownKey,
    classify,
    key_problem,
)
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import WEIGHTS_FILE
from adapterd.loader.manifest import TensorEntry


@dataclass(frozen=True, slots=True)
class Pair:
    """A and B of one module, as the header describes them."""

    module: str
    a: TensorEntry
    b: TensorEntry


def pair_up(tensors: Iterable[TensorEntry], findings: Findings) -> tuple[Pair, ...]:
    """Pairs sorted by module; whatever is not half of one is a finding (I4: nothing is dropped silently)."""
    entries = {t.name: t for t in tensors}
    keys = [classify(name) for name in entries]
    halves: dict[tuple[str, str], TensorEntry] = {}
    for key in keys:
        if isinstance(key, LoraKey):
            halves[key.module, key.side] = entries[key.name]
    findings.add(*_key_problems(keys, halves.keys()))
    if not keys:
        findings.add(_empty())
    modules = sorted({module for module, _ in halves})
    findings.add(*_half_problems(modules, halves.keys()))
    complete = [m for m in modules if (m, "A") in halves and (m, "B") in halves]
    return tuple(Pair(m, halves[m, "A"], halves[m, "B"]) for m in complete)


def _key_problems(keys: Iterable[TensorKey], halves: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    """One problem for each kind of stray tensor, with the first name and the number of them."""
    taken = set(halves)
    found: dict[object, list[Problem]] = {}
    for key in keys:
        if isinstance(key, LoraKey):
            continue
        problem = key_problem(key)
        logical = (key.logical.module, key.logical.side) if isinstance(key, UnknownKey) and key.logical else None
        if logical in taken:
            problem = _duplicate(key)
        elif logical is not None:
            taken.add(logical)
        kind = problem.code, key.feature if isinstance(key, FeatureKey) else problem.message
        found.setdefault(kind, []).append(problem)
    for problems in found.values():
        first = problems[0]
        names = several((p.where for p in problems[1:]), 3)
        more = f" ({len(problems)} such tensors: this one, {names})" if len(problems) > 1 else ""
        yield replace(first, message=first.message + more)


def _duplicate(key: FeatureKey | PrefixKey | UnknownKey) -> Problem:
    return reject(
        Code.DUPLICATE_LOGICAL_KEY,
        shown(key.name),
        "a second spelling of a tensor that is there already",
        "Save the adapter with PEFT's save_pretrained.",
    )


def _half_problems(modules: Iterable[str], halves: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    there = set(halves)
    for module in modules:
        for side, other in (("A", "B"), ("B", "A")):
            if (module, side) not in there:
                name = f"{PREFIX}{module}.lora_{side}.weight"
                message = f"is missing; lora_{other} of this module is there"
                yield reject(Code.MISSING_TENSOR, shown(name), message, "Save the whole adapter again.")


def _empty() -> Problem:
    hint = "Under ZeRO-3, gather the parameters before saving (stage3_gather_16bit_weights_on_model_save)."
    return reject(Code.EMPTY_ADAPTER, WEIGHTS_FILE, "the file holds no tensor", hint)
