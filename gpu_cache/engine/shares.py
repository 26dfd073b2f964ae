"""What each composition is to the kernels: a share, that is the number of an entry which stands ready in one table.

    entries[share] = {0, rows, first cell, blocks, start, 0, 0, 0}        int32, as `device_plan` lists them

    share 0      nobody's: the base's rows, an entry without rows
    share 1      the reference's: rows that kernels cannot serve, the same
    2 + slot     the resident of the slot, alone with weight 1
    from there   compositions: of several, or with a weight

A step's lists are made by taking entries by their shares, in a few numpy calls. A composition is looked at once: as
long as steps name it, the address of its tuple is enough to know it by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from adapterd.gpu_cache.table_shape import PLAN_ENTRY

if TYPE_CHECKING:
    from adapterd.gpu_cache.engine.device_tables import DeviceTables
    from adapterd.gpu_cache.engine.plan import Composition, ResidentLike

ENTRY = PLAN_ENTRY
NOBODY, REFERENCE, FIRST_SLOT = 0, 1, 2
KEPT_MIXES = 1024
"""Compositions, beside single residents, that are remembered before all are forgotten."""
Ints = NDArray[np.int32]
NO_MIXES = np.empty((2, 0), np.int32)


class Shares:
    """Not thread-safe: the engine's step lock guards it.

    Args:
        tables: where residents' rows are, and which residents they have room for.
        check: raises for a resident that the engine does not serve; asked once for each.

    Attributes:
        entries: int32 [shares, 8].
        unsent: by slot, residents whose rows the tables lack. Whoever sends one takes it out.
    """

    def __init__(self, tables: DeviceTables, check: Callable[[ResidentLike], object]) -> None:
        self._tables, self._check = tables, check
        self._first_mix = FIRST_SLOT + tables.shape.slots
        self.entries = np.zeros((self._first_mix + 64, ENTRY), np.int32)
        self.entries[FIRST_SLOT:, 1], self.entries[FIRST_SLOT:, 4] = 1, -1
        self.entries[FIRST_SLOT : self._first_mix, 2] = np.arange(tables.shape.slots) * tables.shape.stride
        self.unsent: dict[int, ResidentLike] = {}
        self._verdicts: dict[int, tuple[ResidentLike, str]] = {}
        self._mixes: dict[tuple[tuple[int, int, float], ...], int] = {}
        self._blocks: list[Ints] = []  # as `mixed` gives them
        self._known: dict[int, int] = {}
        self._held: dict[int, Composition] = {}  # so that no other one can come to an address in `_known`

    def of(self, compositions: tuple[Composition, ...]) -> list[int]:
        """The share of each. Their residents are current, which the cache has checked (I13).

        Raises:
            As `check`.
        """
        addresses = list(map(id, compositions))
        found = list(map(self._known.get, addresses))
        if None in found:
            if len(self._mixes) > KEPT_MIXES:
                self._forget_mixes()
                found = [None] * len(found)
            for index, share in enumerate(found):
                if share is None:
                    found[index] = self._learn(addresses[index], compositions[index])
            if len(self._known) > 2 * len(found):
                self._known = dict(zip(addresses, found, strict=True))  # type: ignore[arg-type]
                self._held = dict(zip(addresses, compositions, strict=True))
        return found  # type: ignore[return-value]

    def why_not(self, residents: Iterable[ResidentLike]) -> list[str]:
        """Why kernels cannot serve a composition of these: nothing, if they can."""
        return [why for resident in residents if (why := self._verdict(resident))]

    def mixed(self, shares: Sequence[int]) -> Ints:
        """The blocks of the compositions among `shares`, each once; their entries are told where.

        Returns:
            [2, blocks]: cells, and the bits of fp32 weights.
        """
        first = self._first_mix
        if max(shares) < first:
            return NO_MIXES
        used = sorted({share for share in shares if share >= first})
        blocks = self.entries[used, 3]
        self.entries[used, 4] = blocks.cumsum() - blocks
        return np.concatenate([self._blocks[share - first] for share in used], axis=1)

    # --- one composition

    def _learn(self, address: int, composition: Composition) -> int:
        share = self._share(composition)
        self._held[address] = composition  # first: an address is known only while what stands there is held
        self._known[address] = share
        return share

    def _share(self, composition: Composition) -> int:
        if not composition:
            return NOBODY
        if self.why_not(resident for resident, _ in composition):
            return REFERENCE
        resident, weight = composition[0]
        if len(composition) == 1 and weight == 1.0:
            return FIRST_SLOT + resident.slot
        key = tuple((resident.slot, resident.generation, float(weight)) for resident, weight in composition)
        known = self._mixes.get(key)
        return self._mix(key) if known is None else known

    def _verdict(self, resident: ResidentLike) -> str:
        known = self._verdicts.get(resident.slot)
        if known is not None and known[0] is resident:
            return known[1]
        self._check(resident)
        why = self._tables.why_not(resident)
        if not why:
            self.entries[FIRST_SLOT + resident.slot, 3] = self._tables.blocks_of(resident)
            if self._tables.missing(resident):
                self.unsent[resident.slot] = resident
        self._verdicts[resident.slot] = resident, why
        return why

    def _mix(self, key: tuple[tuple[int, int, float], ...]) -> int:
        """A share of its own. It is known by its key last of all: a fault on the way must not leave a number behind
        that the next composition is given, too."""
        cells: list[int] = []
        weights: list[float] = []
        for slot, _, weight in key:
            _, _, first, blocks, *_ = self.entries[FIRST_SLOT + slot].tolist()
            cells += range(first, first + blocks)
            weights += [weight] * blocks
        blocks_of_it = np.array((cells, np.array(weights, np.float32).view(np.int32)), np.int32)
        share = self._first_mix + len(self._blocks)
        if share == len(self.entries):
            self.entries = np.concatenate((self.entries, self.entries[self._first_mix :]))
        self.entries[share, 2], self.entries[share, 3] = 0, len(cells)
        self._blocks.append(blocks_of_it)
        self._mixes[key] = share
        return share

    def _forget_mixes(self) -> None:
        self._mixes.clear()
        self._blocks.clear()
        self._known, self._held = {}, {}
