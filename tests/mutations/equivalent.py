"""Mutants that change nothing that anybody could notice, each with its reason. `test_sites` asserts that they exist.

A line is named by its file, its function and its text, not by its number: it stays excluded when it moves,
and comes back when it changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mutations.sites import Mutant


@dataclass(frozen=True, slots=True)
class Equivalent:
    """Mutants of `function` in `path` by `operator` (`*`: any) whose text before is `before`."""

    path: str
    function: str
    operator: str
    before: str
    reason: str

    def covers(self, mutant: Mutant) -> bool:
        return (
            (mutant.path, mutant.function) == (self.path, self.function)
            and self.operator in {"*", mutant.operator}
            and " ".join(mutant.before.split()) == self.before
        )


EQUIVALENT: tuple[Equivalent, ...] = ()


def excluded(mutant: Mutant) -> Equivalent | None:
    """Why the mutant is left out, or None."""
    return next((e for e in EQUIVALENT if e.covers(mutant)), None)
