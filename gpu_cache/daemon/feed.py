"""The residency feed: every change has a number, and whoever knows the last one gets what came after it.

Nothing is told of a version but where it is now, so that a reader who looks seldom gets each version once.
What is gone is remembered, too, the last `KEPT_GONE` of them; whoever was away for longer gets everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adapterd.gpu_cache.daemon.messages import Gone, Located, ResidencyAnswer
from adapterd.gpu_cache.daemon.served import ResidenceRow
from adapterd.gpu_cache.records import Place

KEPT_GONE = 4096

Key = tuple[str, str]
"""(tenant, digest)"""
Facts = tuple[tuple[str, ...], Place, int, int, int | None, bool]
"""Of a version: its fields in `Located`, from `adapters` on."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a reader is; None in either is the beginning."""

    feed: str | None = None
    sequence: int | None = None


class ResidencyFeed:
    """Compares what the cache says with what it said before. One thread.

    Args:
        name: of this run; cursors of another run are worth nothing.
        kept_gone: how many of the versions that left are remembered.
    """

    def __init__(self, name: str, kept_gone: int = KEPT_GONE) -> None:
        self.name, self.sequence = name, 0
        self._kept_gone = kept_gone
        self._here: dict[Key, tuple[int, Facts]] = {}
        self._gone: dict[Key, int] = {}  # oldest first
        self._forgotten = 0  # up to here, leavings are not known any more

    def take(self, rows: Iterable[ResidenceRow]) -> None:
        """What is resident now."""
        now = {(row.tenant, row.digest): _facts(row) for row in rows if row.tier is not Place.ABSENT}
        for key, facts in now.items():
            if key not in self._here or self._here[key][1] != facts:
                self._here[key] = self._next(), facts
                self._gone.pop(key, None)
        for key in self._here.keys() - now.keys():
            del self._here[key]
            self._gone[key] = self._next()
        while len(self._gone) > self._kept_gone:
            self._forgotten = self._gone.pop(next(iter(self._gone)))

    def since(self, cursor: Cursor) -> ResidencyAnswer:
        """What has changed after the cursor; everything if that is not known."""
        after = cursor.sequence
        known = cursor.feed == self.name and after is not None and self._forgotten <= after <= self.sequence
        if not known or after is None:
            return self._answer(complete=True, after=0)
        return self._answer(complete=False, after=after)

    def news(self, cursor: Cursor) -> bool:
        """Whether `since` would say anything."""
        return cursor != Cursor(self.name, self.sequence)

    def _answer(self, *, complete: bool, after: int) -> ResidencyAnswer:
        gone = () if complete else tuple(Gone(tenant=t, digest=d) for (t, d), n in self._gone.items() if n > after)
        return ResidencyAnswer(
            feed=self.name,
            sequence=self.sequence,
            complete=complete,
            adapters=tuple(_located(key, facts) for key, (number, facts) in self._here.items() if number > after),
            gone=gone,
        )

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence


def _facts(row: ResidenceRow) -> Facts:
    """What a router is told of a row. Who holds it is left out: that changes with every request."""
    return row.adapters, row.tier, row.bytes, row.rank, row.generation, row.pinned


def _located(key: Key, facts: Facts) -> Located:
    adapters, tier, nbytes, rank, generation, pinned = facts
    return Located(
        tenant=key[0], digest=key[1], adapters=adapters, tier=tier, bytes=nbytes, rank=rank, generation=generation,
        pinned=pinned,
    )  # fmt: skip
