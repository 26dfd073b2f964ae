"""Which of the base's namings an adapter is written in: its own table's or one alternative's, as a whole.

The primary naming wins if all of the adapter's modules are in it; else exactly one alternative must have
them all. Anything else is a refusal: nothing is guessed, neither by width nor by likeness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from adapterd.loader.base_alternatives import PRIMARY
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks.findings import several
from adapterd.loader.checks.fit import module_problems
from adapterd.loader.checks.pairs import Pair
from adapterd.loader.errors import Code, Problem, reject
from adapterd.loader.formats.text import shown
from adapterd.loader.limits import Limits


@dataclass(frozen=True, slots=True)
class Naming:
    """What an adapter's names mean.

    Attributes:
        name: `primary`, or an alternative's name.
        base: the base as this naming writes it; names in the config and in the file are looked up here.
        own: a name in this naming → the base's own path, where they differ.
        unclear: why no naming could be bound, in which case this one is merely the nearest.
    """

    name: str
    base: BaseSpec
    own: Mapping[str, str]
    unclear: Problem | None = None

    def path(self, module: str) -> str:
        """The base's own path of a module that the adapter calls `module`."""
        return self.own.get(module, module)


def bind(modules: Sequence[str], base: BaseSpec) -> Naming:
    """The naming of `base` in which all of `modules` are there."""
    primary = Naming(PRIMARY, base, {})
    if not base.alternatives or not _strange(modules, primary):
        return primary
    others = [Naming(a.name, base.named(a.name), dict(a.renames)) for a in base.alternatives]
    fitting = [naming for naming in others if not _strange(modules, naming)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        return replace(fitting[0], unclear=_several(modules, base, fitting))
    nearest = min((primary, *others), key=lambda naming: len(_strange(modules, naming)))
    return replace(nearest, unclear=_mixed(modules, nearest, (primary, *others)))


def _strange(modules: Sequence[str], naming: Naming) -> list[str]:
    return [m for m in modules if naming.base.module(m) is None]


def _several(modules: Sequence[str], base: BaseSpec, fitting: Sequence[Naming]) -> Problem:
    renamed = next(m for m in modules if base.module(m) is None)
    names = several(naming.name for naming in fitting)
    message = f"is a name in several alternative tables of the base: {names}"
    hint = "The base's operator must tell these tables apart, or the adapter must use the base's own names."
    return reject(Code.UNKNOWN_MODULE, shown(renamed), message, hint)


def _mixed(modules: Sequence[str], nearest: Naming, namings: Sequence[Naming]) -> Problem | None:
    """If each module is known somewhere; otherwise there are unknown ones, and these are to be told."""
    if any(all(n.base.module(m) is None for n in namings) for m in modules):
        return None
    stray = _strange(modules, nearest)[0]
    home = next(n.name for n in namings if n.base.module(stray) is not None)
    message = f"is a name of the base's table '{home}', while others of the adapter are of '{nearest.name}'"
    hint = "One adapter uses one table's names throughout. Was it merged from two?"
    return reject(Code.UNKNOWN_MODULE, shown(stray), message, hint)


def naming_problems(pairs: Sequence[Pair], naming: Naming, base: BaseSpec, limits: Limits) -> Iterator[Problem]:
    """What is wrong with the modules: `module_problems` in the naming, and which others were tried."""
    if naming.unclear is not None:
        yield naming.unclear
        return
    tried = several([PRIMARY, *(a.name for a in base.alternatives)], 8)
    for problem in module_problems(pairs, naming.base, limits, naming.own):
        if problem.code is Code.UNKNOWN_MODULE and base.alternatives:
            yield replace(problem, hint=f"{problem.hint} No table has all of its names; tried: {tried}.".strip())
        else:
            yield problem
