"""Bytes on their way from host memory into claimed room: fetches after the claim, copies, landings and losses.

The host's memory is held while copies read it: the last copy to land lets go of it. After a copy that the device
refused it is never let go, for what was enqueued may still read it.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Protocol

from adapterd.gpu_cache.asking import Desk, Images
from adapterd.gpu_cache.copies import CopyQueue, Landed, Lost, Transfer
from adapterd.gpu_cache.host.interface import Failure, Image, Origin
from adapterd.gpu_cache.host.records import Claim, claim_of
from adapterd.gpu_cache.records import Ask, Entry, Hold, LeaseRecord, Load
from adapterd.gpu_cache.slabs import SlabTensors
from adapterd.gpu_cache.vram_tier import VramTier
from adapterd.loader.errors import Problem


class ArrivalsOwner(Protocol):
    """Whom arrivals tell, with the cache's lock held."""

    def arrived(self, entry: Entry) -> None:
        """Its bytes are in VRAM."""
        ...

    def fail(self, record: LeaseRecord, problems: tuple[Problem, ...]) -> None: ...

    def tidy(self, entry: Entry) -> None: ...


class Loads:
    """What was loaded into VRAM. *Steady*: the packed bytes were in host memory; *cold*: they were not.

    Attributes:
        origins: loads, by where the bytes were.
        seconds: by temperature and stage (`verify`, `pack`, `copy`), summed over loads.
        copied_bytes: whole pages.
    """

    def __init__(self) -> None:
        self.origins: Counter[Origin] = Counter()
        self.seconds: dict[str, Counter[str]] = {"cold": Counter(), "steady": Counter()}
        self.copied_bytes = 0

    def copy(self) -> Loads:
        """As they are now."""
        copied = Loads()
        copied.origins, copied.copied_bytes = self.origins.copy(), self.copied_bytes
        copied.seconds = {kind: stages.copy() for kind, stages in self.seconds.items()}
        return copied

    def note(self, image: Image, copy_seconds: float) -> None:
        self.origins[image.origin] += 1
        self.copied_bytes += image.layout.nbytes
        stages = self.seconds["steady" if image.origin is Origin.HOST else "cold"]
        for stage, seconds in image.seconds.items():
            stages[stage] += seconds  # type: ignore[assignment]
        stages["copy"] += copy_seconds  # type: ignore[assignment]


class Arrivals:
    """Methods need the cache's lock."""

    def __init__(self, desk: Desk, vram: VramTier, copies: CopyQueue, slabs: SlabTensors, owner: ArrivalsOwner) -> None:
        self._desk, self._vram, self._copies, self._slabs, self._owner = desk, vram, copies, slabs, owner
        self.loads = Loads()

    def bring(self, record: LeaseRecord, entries: list[Entry]) -> None:
        """Fills the room that `entries` have claimed: from the images that the lease holds, else by new fetches."""
        ask, images = record.fetch, record.images
        record.fetch, record.images = None, {}
        here = [entry for entry in entries if entry in images]
        if ask is not None and here:
            hold = Hold(ask, len(here))
            for entry in here:
                self._copy(entry, images[entry], hold)
        else:
            self._desk.let_go(ask)
        for entry in entries:
            if entry not in images:
                self._send_for(entry, record)

    def cancel(self, entry: Entry) -> None:
        """Nobody wants the bytes that claimed room waits for."""
        self._desk.let_go(entry.delivery)
        entry.delivery = None
        self._vram.unclaim(entry)

    def land(self, landed: Landed) -> None:
        entry, load = landed.entry, landed.entry.load
        assert load is not None
        entry.copied, entry.load = True, None
        self._slabs.use(load.image.slab, -1)
        load.hold.left -= 1
        if not load.hold.left:
            self._desk.let_go(load.hold.fetch)
        self.loads.note(entry.cold or load.image, landed.seconds)
        entry.cold = None
        self._owner.arrived(entry)

    def lose(self, lost: Lost) -> None:
        """Its pages, in the arena and in the slab, are never used again: for the books it stays in flight."""
        entry = lost.entry
        for record in [*entry.holders.values(), *entry.waiting.values()]:
            self._owner.fail(record, lost.problems)

    def _copy(self, entry: Entry, image: Image, hold: Hold) -> None:
        entry.load = Load(image, hold)
        self._slabs.use(image.slab, 1)
        self._copies.add(Transfer(entry, self._slabs.tensor(image.slab), image.pages, self._vram.take(entry)))

    def _send_for(self, entry: Entry, record: LeaseRecord) -> None:
        resolved = next(found for each, found in record.claims if each is entry)
        entry.delivery = self._desk.fetch([resolved], record, partial(self._delivered, entry, claim_of(resolved)))

    def _delivered(self, entry: Entry, claim: Claim, ask: Ask, outcome: Images | Failure) -> None:
        if entry.delivery is not ask:
            return
        entry.delivery = None
        if not isinstance(outcome, Failure) and self._desk.readable(outcome):
            self._copy(entry, outcome[0], Hold(ask, 1))
            return
        self._desk.let_go(ask)
        if not isinstance(outcome, Failure):  # its loader died meanwhile, and its slab was given back
            self._send_for(entry, next(iter(entry.holders.values())))
            return
        entry.verified.clear()
        for record in [*entry.holders.values(), *entry.waiting.values()]:
            if any(each is entry and claim_of(found) == claim for each, found in record.claims):
                self._owner.fail(record, outcome.problems)
        if entry.holders:  # under another claim, which has to hold by itself
            self._send_for(entry, next(iter(entry.holders.values())))
        self._owner.tidy(entry)
