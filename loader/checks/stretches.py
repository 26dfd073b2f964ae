"""A tensor file cut into stretches that are read at once: what lies together is hashed and measured from one memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adapterd.loader.checks.pairs import Pair

STRETCH_BYTES = 2 << 20
"""Small pairs are read together up to this much, which the caches of one core hold."""

MOST_BYTES = 16 << 20
"""Of one pair that is measured from the memory that is hashed."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes `begin` to `end` of the file, and the numbers of the pairs that lie in them."""

    begin: int
    end: int
    pairs: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def cut(size: int, pairs: Sequence[Pair]) -> tuple[tuple[Stretch, ...], tuple[int, ...]]:
    """A file of `size` bytes in stretches, all of it and in order; and the numbers of the pairs that lie in none.

    Those are larger than a stretch may be, or lie among the tensors of other pairs.
    """
    cutting = _Cutting()
    for low, high, number in sorted((min(p.a.begin, p.b.begin), max(p.a.end, p.b.end), i) for i, p in enumerate(pairs)):
        cutting.take(low, high, number)
    cutting.close_at(size)
    return tuple(cutting.done), tuple(cutting.apart)


class _Cutting:
    """The stretches so far, and the one that is being filled: `_pairs`, which lie in bytes `_begin` to `_end`."""

    def __init__(self) -> None:
        self.done: list[Stretch] = []
        self.apart: list[int] = []
        self._begin = self._end = 0
        self._pairs: list[int] = []

    def take(self, low: int, high: int, number: int) -> None:
        """The pair that lies in bytes `low` to `high`; no pair before it began later."""
        if self._pairs and max(self._end, high) - self._begin <= STRETCH_BYTES:
            self._pairs.append(number)
            self._end = max(self._end, high)
        elif low >= self._end and high - low <= MOST_BYTES:
            self.close_at(low)
            self._begin, self._end, self._pairs = low, high, [number]
        else:
            self.apart.append(number)

    def close_at(self, offset: int) -> None:
        """End the stretch; what is left before `offset` holds no pair."""
        if self._pairs:
            self.done.append(Stretch(self._begin, self._end, tuple(self._pairs)))
            self._pairs = []
        for begin in range(self._end, offset, STRETCH_BYTES):
            self.done.append(Stretch(begin, min(begin + STRETCH_BYTES, offset)))
        self._end = max(self._end, offset)
