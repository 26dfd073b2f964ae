"""What a verdict is, and how findings add up to one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from adapterd.loader.errors import Code, Problem
from adapterd.loader.manifest import Manifest

MAX_PROBLEMS = 50
"""A verdict lists no more; a file with 20,000 wrong names is not told each of them."""

ALLOWABLE = frozenset({Code.ZERO_DELTA, Code.BASE_MISMATCH, Code.BASE_REVISION_MISMATCH})
"""What an uploader may ask for by name: opinions about a package that is whole and fits in all else.

Everything else is either a broken file or something that the engine would compute wrongly.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to `examine`.

    Attributes:
        problems: in the order of the checks; refusals before warnings.
        manifest: what was found good, or None if anything rejects.
    """

    problems: tuple[Problem, ...]
    manifest: Manifest | None

    @property
    def ok(self) -> bool:
        """No refusal; warnings may be there."""
        return self.manifest is not None


class Findings:
    """Problems as the checks come upon them, weighed by a policy.

    Args:
        allow: refusals that become warnings, within `ALLOWABLE`.
        refuse: warnings that become refusals; any code.
    """

    def __init__(self, allow: Iterable[Code] = (), refuse: Iterable[Code] = ()) -> None:
        self._allow = frozenset(allow) & ALLOWABLE
        self._refuse = frozenset(refuse)
        self._rejects: list[Problem] = []
        self._warnings: list[Problem] = []

    def add(self, *problems: Problem) -> None:
        """Keep them in this order, each as severe as the policy says."""
        for problem in problems:
            if problem.severity == "reject" and problem.code in self._allow:
                self._warnings.append(replace(problem, severity="warn", hint="Allowed by name for this version."))
            elif problem.severity == "reject":
                self._rejects.append(problem)
            elif problem.code in self._refuse:
                self._rejects.append(replace(problem, severity="reject"))
            else:
                self._warnings.append(problem)

    @property
    def rejected(self) -> bool:
        return bool(self._rejects)

    def verdict(self, manifest: Manifest | None) -> Verdict:
        """All that was found. `manifest` is dropped if anything rejects."""
        problems = [*self._rejects, *self._warnings]
        if len(problems) > MAX_PROBLEMS:
            left = problems[MAX_PROBLEMS - 1 :]
            more = f"{len(left)} more problems are not listed, the next is at {left[0].where}"
            problems = [*problems[: MAX_PROBLEMS - 1], replace(left[0], message=more, hint="")]
        return Verdict(tuple(problems), None if self._rejects else manifest)


def several(names: Iterable[str], limit: int = 4) -> str:
    """`a, b, c, d and 7 more`."""
    listed = list(names)
    text = ", ".join(listed[:limit])
    return f"{text} and {len(listed) - limit} more" if len(listed) > limit else text
