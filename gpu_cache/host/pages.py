"""Pages of the host slab. Any free pages serve, so nothing fragments; neighbours are preferred.

Neighbours matter to the loader, which packs an image in one piece: straight into the slab when its pages are
one run, through a buffer of its own when they are not.
"""

from __future__ import annotations

from collections.abc import Sequence

_FREE, _USED = b"\x01", b"\x00"


class SlabPages:
    """Free and used pages. Guarded by the cache's lock."""

    def __init__(self, count: int) -> None:
        self._free = bytearray(_FREE * count)
        self.free = count

    def take(self, wanted: int) -> tuple[int, ...] | None:
        """`wanted` ≥ 1 pages in ascending order, one run if there is one, or None when fewer are free."""
        if wanted > self.free:
            return None
        start = self._free.find(_FREE * wanted)
        pages = tuple(range(start, start + wanted)) if start >= 0 else self._first(wanted)
        for page in pages:
            self._free[page] = _USED[0]
        self.free -= wanted
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self._free[page] == _USED[0], f"slab page {page} is free already"
            self._free[page] = _FREE[0]
        self.free += len(pages)

    def _first(self, wanted: int) -> tuple[int, ...]:
        found: list[int] = []
        while len(found) < wanted:
            found.append(self._free.index(_FREE, found[-1] + 1 if found else 0))
        return tuple(found)
