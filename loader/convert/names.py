"""Which PEFT name a misspelt tensor name stands for, proved by the base's own modules.

A rewriting is made only if exactly one module of the base can be meant, whatever of the prefixes is taken
off or put on; if no two tensors come out under one name; and if no more than one adapter's name stands in
the file. Everything else is a refusal: a converter that guesses makes adapters that load and do the wrong thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks.findings import several
from adapterd.loader.checks.fit import SERVED, near_names
from adapterd.loader.errors import Code, Problem, Refused, reject
from adapterd.loader.formats.tensor_names import (
    INNER_WRAPPERS,
    OUTER_WRAPPERS,
    PREFIX,
    LoraKey,
    Side,
    classify,
    key_problem,
)
from adapterd.loader.formats.text import shown

_LORA = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_HEAD = tuple(PREFIX.rstrip(".").split("."))


class Step(StrEnum):
    """What was done to a name."""

    WRAPPER = "a wrapper's prefix taken off"
    DOUBLED = "the doubled base_model.model. made one"
    MISSING = "base_model.model. put in front"
    ADAPTER = "the adapter's name taken out"


@dataclass(frozen=True, slots=True)
class Rename:
    """One tensor. Its name stays as it is where there is no step.

    Attributes:
        old, new: full names in the file.
        module: of the base.
        seen: the paths under which training may have known the module, the base's own among them.
    """

    old: str
    new: str
    module: str
    side: Side
    adapter: str | None
    seen: tuple[str, ...]
    steps: tuple[Step, ...]


def renames(names: Sequence[str], base: BaseSpec) -> tuple[Rename, ...]:
    """One for each name, in their order.

    Raises:
        Refused: all that cannot be proved, one problem for each kind: UNKNOWN_MODULE, UNKNOWN_KEY, KEY_PREFIX,
            UNSUPPORTED_FEATURE, DUPLICATE_LOGICAL_KEY.
    """
    served = {m.path for m in base.modules if m.kind in SERVED}
    found: list[Rename] = []
    problems: list[Problem] = []
    for name in names:
        one = _rename(name, served, base)
        if isinstance(one, Rename):
            found.append(one)
        else:
            problems.append(one)
    told = [*_grouped(problems), *_grouped(_collisions(found)), *_several_adapters(found)]
    if told:
        raise Refused(*told)
    return tuple(found)


def _grouped(problems: Iterable[Problem]) -> Iterator[Problem]:
    """The first of each kind, with the number of tensors that it is about."""
    kinds: dict[tuple[Code, str], list[Problem]] = {}
    for problem in problems:
        about_no_tensor = "" if problem.code is Code.DUPLICATE_LOGICAL_KEY else problem.message
        kinds.setdefault((problem.code, about_no_tensor), []).append(problem)
    for same in kinds.values():
        more = f" ({len(same)} such tensors)" if len(same) > 1 else ""
        yield replace(same[0], message=same[0].message + more)


def _rename(name: str, served: set[str], base: BaseSpec) -> Rename | Problem:
    match = _LORA.fullmatch(name)
    if match is None:
        return _leftover(name)
    paths = _paths(match["path"])
    modules = [path for path in paths if path in served]
    if not modules:
        return _no_module(name, paths[-1], base)
    if len(modules) > 1:
        message = f"may be meant for {several(map(shown, modules))}; which one cannot be told from the file"
        return reject(Code.KEY_PREFIX, shown(name), message, "Save the adapter with PEFT's save_pretrained.")
    side: Side = "A" if match["side"] == "A" else "B"
    new = f"{PREFIX}{modules[0]}.lora_{side}.weight"
    steps = tuple(_steps(match["path"], match["adapter"])) if new != name else ()
    seen = _seen(match["path"]) if steps else (modules[0],)
    return Rename(name, new, modules[0], side, match["adapter"], seen, steps)


def _paths(full: str) -> list[str]:
    """All module paths that `full` may mean, least taken off first: prefixes in front, wrappers anywhere."""
    parts = full.split(".")
    paths = [".".join(parts)]
    while taken := _taken_off(parts):
        parts = parts[taken:]
        paths.append(".".join(parts))
    bare = [".".join(p for p in path.split(".") if p not in INNER_WRAPPERS) for path in paths]
    return [path for path in dict.fromkeys([*paths, *bare]) if path]


def _seen(full: str) -> tuple[str, ...]:
    """What PEFT may have called the module in training: whatever stands behind its own, the first, prefix."""
    at = f".{full}".find(f".{PREFIX}")
    return tuple(_paths(full if at < 0 else full[at + len(PREFIX) :]))


def _taken_off(parts: Sequence[str]) -> int:
    """How many parts in front are PEFT's prefix or a wrapper; something must be left."""
    if tuple(parts[: len(_HEAD)]) == _HEAD:
        return len(_HEAD) if len(parts) > len(_HEAD) else 0
    return 1 if len(parts) > 1 and parts[0] in OUTER_WRAPPERS else 0


def _steps(full: str, adapter: str | None) -> Iterator[Step]:
    parts, heads, wrapped = full.split("."), 0, False
    while taken := _taken_off(parts):
        heads, wrapped = heads + (taken > 1), wrapped or taken == 1
        parts = parts[taken:]
    if wrapped or any(p in INNER_WRAPPERS for p in parts):
        yield Step.WRAPPER
    if heads > 1:
        yield Step.DOUBLED
    if heads == 0:
        yield Step.MISSING
    if adapter is not None:
        yield Step.ADAPTER


def _leftover(name: str) -> Problem:
    """Not A or B: judged under the name that it has without what a wrapper put in front."""
    bare = _paths(name)[-1]
    for candidate in (PREFIX + bare, bare):
        key = classify(candidate)
        if not isinstance(key, LoraKey):
            problem = key_problem(key)
            return reject(problem.code, shown(name), f"cannot be converted: {problem.message}", problem.hint)
    return reject(Code.UNKNOWN_KEY, shown(name), "cannot be converted: not the name of a LoRA tensor")


def _no_module(name: str, path: str, base: BaseSpec) -> Problem:
    message = f"stands for no module of the base {shown(base.id)}, whatever prefix is taken off"
    near = near_names(path, base)
    hint = f"Near ones: {', '.join(near)}. " if near else ""
    return reject(Code.UNKNOWN_MODULE, shown(name), message, f"{hint}Is --base the base that it was trained on?")


def _collisions(found: Iterable[Rename]) -> Iterator[Problem]:
    taken: dict[str, str] = {}
    for one in found:
        first = taken.setdefault(one.new, one.old)
        if first != one.old:
            message = f"would get the name that {shown(first)} gets, {shown(one.new)}"
            hint = "Only one of the two is the adapter; save it again from the object that was trained."
            yield reject(Code.DUPLICATE_LOGICAL_KEY, shown(one.old), message, hint)


def _several_adapters(found: Iterable[Rename]) -> Iterator[Problem]:
    first: dict[str | None, str] = {}
    for one in found:
        first.setdefault(one.adapter, one.old)
    if len(first) > 1:
        names = several(shown(adapter, 40) if adapter else "none" for adapter in first)
        where = next(name for adapter, name in first.items() if adapter is not None)
        message = f"the adapters' names {names} stand in the keys: is that one adapter or several?"
        yield reject(Code.UNKNOWN_KEY, shown(where), message, "Save each one on its own (selected_adapters=[NAME]).")
