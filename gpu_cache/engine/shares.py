"""What each composition is to the kernels: a share, that is the number of an entry which stands ready in one table.

    entries[share] = {0, rows, first cell, blocks, start, 0, 0, 0}        int32, as `device_plan` lists them

    share 0      nobody's: the base's rows, an entry without rows
    share 1      the reference's: rows that kernels cannot serve, the same
    2 + slot     the resident of the slot, alone with weight 1
    from there   compositions: of several, or with a weight

A step's lists are made by taking entries by their shares, in a few numpy calls. A composition is looked at once: as
long as steps name it, the address of its tuple is enough to know it by. Of a batch that differs from the last one in
few entries, only those are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from adapterd.gpu_cache.table_shape import PLAN_ENTRY

if TYPE_CHECKING:
    from adapterd.gpu_cache.engine.device_tables import DeviceTables
    from adapterd.gpu_cache.engine.plan import BatchPlan, Composition, ResidentLike

ENTRY = PLAN_ENTRY
NOBODY, REFERENCE, FIRST_SLOT = 0, 1, 2
KEPT_MIXES = 1024
"""Compositions, beside single residents, that are remembered before all are forgotten."""
Ints = NDArray[np.int32]
NO_MIXES = np.empty((2, 0), np.int32)
MANY = 4
"""From one changed entry in so many on, all are looked at: a list at once costs less than its entries one by one."""


@dataclass(slots=True, eq=False)
class StepShares:
    """The shares of a step's entries. Nobody changes it; that it is not frozen saves a microsecond a step.

    Attributes:
        listed, array: in order.
        distinct: each once.
        lowest, highest: none is beyond.
    """

    listed: list[int]
    array: NDArray[np.intp]
    distinct: set[int]
    lowest: int
    highest: int

    @staticmethod
    def of(listed: list[int]) -> StepShares:
        return StepShares(listed, np.array(listed, np.intp), {*listed}, min(listed), max(listed))

    @property
    def groups(self) -> int:
        """Compositions that kernels serve."""
        return len(self.distinct) - (NOBODY in self.distinct) - (REFERENCE in self.distinct)

    @property
    def unserved(self) -> int:
        """Entries that kernels do not serve."""
        if self.lowest >= FIRST_SLOT:
            return 0
        return self.listed.count(NOBODY) + self.listed.count(REFERENCE)


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
        self._pool = np.zeros((2, 512), np.int32)  # as `mixed` gives them, those of all compositions
        self._pooled = 0
        self._pool_at = np.zeros(len(self.entries), np.intp)  # by share, where its own begin
        self._known: dict[int, int] = {}
        self._held: dict[int, Composition] = {}  # so that no other one can come to an address in `_known`
        self._last: tuple[object, StepShares] | None = None  # of a plan, by its mark

    def of_plan(self, plan: BatchPlan) -> StepShares:
        """Those of its entries: only changed ones are looked at, if the last plan here was the one before it.

        Raises:
            As `check`.
        """
        last = self._last
        few = MANY * len(plan.changed) <= len(plan.compositions) and len(self._mixes) <= KEPT_MIXES
        if last is None or plan.follows is not last[0] or not few:
            found = StepShares.of(self.of(plan.compositions))
        else:
            former, lowest, highest = last[1], last[1].lowest, last[1].highest
            listed, array = former.listed.copy(), former.array.copy()
            for index in plan.changed:
                share = listed[index] = array[index] = self._one(plan.compositions[index])
                lowest, highest = min(lowest, share), max(highest, share)
            self._let_go(plan.compositions, listed)
            found = StepShares(listed, array, {*listed}, lowest, highest)
        self._last = plan.mark, found
        return found

    def of(self, compositions: tuple[Composition, ...]) -> list[int]:
        """The share of each. Their residents are current, which the cache has checked (I13).

        Raises:
            As `check`.
        """
        found = list(map(self._known.get, map(id, compositions)))
        if None in found:
            if len(self._mixes) > KEPT_MIXES:
                self._forget_mixes()
            learned = list(map(self._one, compositions))
            self._let_go(compositions, learned)
            return learned
        return found  # type: ignore[return-value]

    def _one(self, composition: Composition) -> int:
        known = self._known.get(id(composition))
        return self._learn(composition) if known is None else known

    def _let_go(self, compositions: tuple[Composition, ...], shares: list[int]) -> None:
        """Of what is known, all but these, where they are less than half of it."""
        if len(self._known) > 2 * len(compositions):
            self._held = {id(one): one for one in compositions}
            self._known = dict(zip(map(id, compositions), shares, strict=True))

    def why_not(self, residents: Iterable[ResidentLike]) -> list[str]:
        """Why kernels cannot serve a composition of these: nothing, if they can."""
        return [why for resident in residents if (why := self._verdict(resident))]

    def mixed(self, shares: StepShares) -> Ints:
        """The blocks of the compositions among `shares`, each once; their entries are told where.

        Returns:
            [2, blocks]: cells, and the bits of fp32 weights.
        """
        first = self._first_mix
        if shares.highest < first:
            return NO_MIXES
        used = shares.array
        if len(shares.distinct) < len(used) or shares.lowest < first:
            used = np.array(sorted(share for share in shares.distinct if share >= first), np.intp)
        if not len(used):
            return NO_MIXES
        blocks = self.entries[:, 3].take(used)
        begins = np.add.accumulate(blocks, out=np.empty(len(used), np.int32)) - blocks
        self.entries[used, 4] = begins
        at = (self._pool_at.take(used) - begins).repeat(blocks)
        at += np.arange(len(at))
        return self._pool.take(at, axis=1)

    # --- one composition

    def _learn(self, composition: Composition) -> int:
        share, address = self._share(composition), id(composition)
        self._held[address] = composition  # first: an address is known only while what stands there is held
        self._known[address] = share
        return share

    def _share(self, composition: Composition) -> int:
        if not composition:
            return NOBODY
        for resident, _ in composition:
            if self._verdict(resident):
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
        pooled = np.array((cells, np.array(weights, np.float32).view(np.int32)), np.int32)
        share = self._first_mix + len(self._mixes)
        self._make_room(share, len(cells))
        self.entries[share, 2], self.entries[share, 3] = 0, len(cells)
        self._pool_at[share] = self._pooled
        self._pool[:, self._pooled : self._pooled + len(cells)] = pooled
        self._pooled += len(cells)
        self._mixes[key] = share
        return share

    def _make_room(self, share: int, blocks: int) -> None:
        if share == len(self.entries):
            self.entries = np.concatenate((self.entries, self.entries[self._first_mix :]))
            self._pool_at = np.concatenate((self._pool_at, self._pool_at[self._first_mix :]))
        while self._pooled + blocks > self._pool.shape[1]:
            self._pool = np.concatenate((self._pool, self._pool), axis=1)

    def _forget_mixes(self) -> None:
        self._mixes.clear()
        self._pooled, self._last = 0, None
        self._known, self._held = {}, {}
