"""Slots: the small numbers under which the engine's tables know a resident adapter, each with a generation.

A slot's generation grows whenever its adapter goes. A plan that still names the old one is found out when
its step begins (SLOT_STALE), instead of reading somebody else's pages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapterd.loader.identity import VersionKey
from adapterd.loader.manifest import Manifest

if TYPE_CHECKING:
    from adapterd.loader.layout import Layout


@dataclass(frozen=True, slots=True)
class Resident:
    """A version with pages in the arena, as the engine sees it.

    Attributes:
        key: what it is.
        slot, generation: where the engine's tables have it, and the how-manieth adapter there it is.
        manifest, layout: its modules, and where each rank block lies (page numbers count from 0 in `pages`).
        pages: the arena's pages; block page `p` is bytes `pages[p] * layout.page_bytes` of the arena.
    """

    key: VersionKey
    slot: int
    generation: int
    manifest: Manifest
    layout: Layout
    pages: tuple[int, ...]


class SlotTable:
    """`count` slots, handed out in turn. Guarded by the cache's lock."""

    def __init__(self, count: int) -> None:
        self._free = deque(range(count))
        self._generations = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """(slot, generation). IndexError when none is free: the caller has counted."""
        slot = self._free.popleft()
        return slot, self._generations[slot]

    def revoke(self, slot: int) -> None:
        """Makes every plan that names the slot stale."""
        self._generations[slot] += 1

    def give_back(self, slot: int) -> None:
        self.revoke(slot)
        self._free.append(slot)

    def current(self, resident: Resident) -> bool:
        """Whether `resident` is what its slot holds now."""
        return self._generations[resident.slot] == resident.generation
