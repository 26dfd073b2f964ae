"""The stager: a lease's life, from what it names to its end. The host verifies and packs, `placement` finds room.

There is one lock, the cache's condition. Methods are called with it held. Under it nothing blocks, no bytes
move and nobody else's code runs; requests to the host are put, marks and waits may be enqueued. What the host has
at hand it gives at once; all else it answers from threads of its own, and each answer takes the lock once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from threading import Condition
from typing import TYPE_CHECKING

from adapterd.gpu_cache.arrivals import Arrivals, Loads
from adapterd.gpu_cache.asking import Desk
from adapterd.gpu_cache.budgets import queue_full
from adapterd.gpu_cache.claims import Claims
from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.copies import CopyQueue
from adapterd.gpu_cache.device import Device
from adapterd.gpu_cache.host.interface import Host, Origin
from adapterd.gpu_cache.placement import Placement
from adapterd.gpu_cache.records import Cause, Entry, LeaseRecord, LeaseState
from adapterd.gpu_cache.remembered import Remembered
from adapterd.gpu_cache.residency import Ledger
from adapterd.gpu_cache.revocation import Refusals, Scrubber
from adapterd.gpu_cache.shelf import Shelf
from adapterd.gpu_cache.slabs import SlabTensors
from adapterd.gpu_cache.versions import Versions
from adapterd.gpu_cache.vram_tier import VramTier
from adapterd.gpu_cache.warm import Meaning, WarmLeases, plain
from adapterd.loader.errors import Problem
from adapterd.loader.identity import VersionKey

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec


class Stager:
    """Entries and leases, and every step between absent and resident."""

    def __init__(
        self,
        config: CacheConfig,
        base: BaseSpec,
        *,
        lock: Condition,
        host: Host,
        device: Device,
        vram: VramTier,
        copies: CopyQueue,
        slabs: SlabTensors,
        refusals: Refusals,
        over: Callable[[LeaseRecord], None],
    ) -> None:
        """Args: over: called with the lock held when a lease that ends by itself has ended: it may be released."""
        self._config, self.base = config, base
        self._lock, self._copies, self._over = lock, copies, over
        self.ledger = Ledger(lambda: {*self.entries, *host.usage().images, *(each.key for each in self.shelf.given_up)})
        self.desk = Desk(host, slabs, lock, self._answered)
        self.remembered = Remembered(2 * config.max_residents, lambda: host.usage().images)
        self._claims = Claims(self.desk, self.ledger, self.remembered, refusals.refusal, self)
        self._arrivals = Arrivals(self.desk, vram, copies, slabs, self)
        self.scrubber = Scrubber(device, vram.arena, config.page_bytes, lock, self._scrubbed)
        self.shelf = Shelf(vram, copies, self._claims, self._arrivals, self.scrubber, self._again)
        self._placement = Placement(
            config.max_composition_rank,
            lock=lock,
            desk=self.desk,
            vram=vram,
            claims=self._claims,
            arrivals=self._arrivals,
            entries=self.entries.values,
            owner=self,
        )
        self._versions = Versions(self.desk, self.shelf, self.ledger, self.remembered, refusals, self._placement, self)
        self._queued: Counter[str] = Counter()
        self._ended: list[LeaseRecord] = []
        self._tick = 0

    @property
    def entries(self) -> dict[VersionKey, Entry]:
        return self.shelf.entries

    @property
    def loads(self) -> Loads:
        return self._arrivals.loads

    @property
    def found(self) -> Counter[Origin | None]:
        """Where leases found what they wanted; None is VRAM."""
        return self._placement.found

    # Leases

    def admit(self, record: LeaseRecord, problems: tuple[Problem, ...] = (), meaning: Meaning | None = None) -> None:
        """Starts a lease. What it names is looked up by the host, unless that is known, or pinned and here."""
        self._queued[record.tenant] += 1
        if problems:
            self.fail(record, problems)
            return
        self._versions.seek(record, meaning)
        most = self._config.tenants.get(record.tenant, self._config.default_budget).max_waiting
        if self._queued[record.tenant] > most:
            self.fail(record, (queue_full(record.tenant, most),))
        elif record.state is LeaseState.RESOLVING:
            self._versions.ask(record)

    def warm(self, seen: WarmLeases, record: LeaseRecord, wish: object) -> bool:
        """Whether a new lease could be made ready the short way."""
        if not seen.fill(record, wish, self.desk.trust_changes, self._tick + 1):
            return False
        self._tick += 1
        self.found[None] += 1
        return True

    def fail(self, record: LeaseRecord, problems: tuple[Problem, ...]) -> None:
        self.move(record, LeaseState.FAILED)
        record.problems = problems
        self._detach(record)
        if record.purpose.brief:
            self._ended.append(record)

    def release(self, record: LeaseRecord) -> None:
        """Cancels what only this lease waited for. What is resident stays until room is needed."""
        if plain(record):
            record.state = LeaseState.RELEASED
            for entry in record.entries:
                del entry.holders[record.seq]
                if entry.spot is None and not entry.holders:
                    self.shelf.rest(entry)
            if self._placement.lines:
                self.advance()
            return
        self.move(record, LeaseState.RELEASED)
        self._detach(record)
        self.advance()

    def pause(self, record: LeaseRecord) -> None:
        """It holds nothing, and remembers what it was on."""
        if record.live and record.state is not LeaseState.PAUSED:
            self.move(record, LeaseState.PAUSED)
            self._detach(record)
            record.forget_hold()
            self.advance()

    def resume(self, record: LeaseRecord) -> None:
        if record.state is LeaseState.PAUSED:
            record.state = LeaseState.RESOLVING
            self.admit(record)

    def _again(self, record: LeaseRecord) -> None:
        self.pause(record)
        self.resume(record)

    def touch(self, entries: Sequence[Entry]) -> None:
        self._tick += 1
        for entry in entries:
            entry.last_used = self._tick

    # What happens

    def advance(self) -> None:
        """Something came free, or came in: let those who wait for room try, in their order."""
        self._placement.advance()

    def line_up(self, on: bool) -> None:
        """While on, whose bytes come in stands in line only: a step that hears of it leaves the room to the next."""
        self._placement.later = on

    def poll(self) -> None:
        """Notices the copies that have completed or were refused."""
        if not (self._copies.news or self._placement.due):
            if self._ended:
                self.finish()
            return
        landed, lost = self._copies.landed(), self._copies.lost()
        for each in landed:
            self._arrivals.land(each)
        for refused in lost:
            self.shelf.forget(refused.entry)
            self._arrivals.lose(refused)
        if landed or lost or self._placement.due:
            self.advance()
        self.finish()

    def finish(self) -> None:
        """Lets go of what ends by itself, and has."""
        while self._ended:
            self._over(self._ended.pop())

    def forget_all(self) -> None:
        """The base was reloaded: no entry is found any more, and every slot is stale at once (I16)."""
        self.remembered.clear()
        for entry in list(self.entries.values()):
            self.shelf.bury(entry, Cause.RELOAD)

    def _answered(self) -> None:
        self._placement.stir()
        self.finish()

    def _scrubbed(self, entry: Entry) -> None:
        self.tidy(entry)
        self.advance()

    # For claims, arrivals and placement

    def proceed(self, record: LeaseRecord) -> None:
        self._placement.proceed(record)

    def arrived(self, entry: Entry) -> None:
        self._placement.arrived(entry)

    def tidy(self, entry: Entry) -> None:
        self.shelf.tidy(entry)

    def move(self, record: LeaseRecord, state: LeaseState) -> None:
        """Into a state in which it is not queued."""
        self._queued[record.tenant] -= record.queued
        record.state = state
        if not self._queued[record.tenant]:
            del self._queued[record.tenant]

    def ended(self, record: LeaseRecord) -> None:
        self._ended.append(record)

    def _detach(self, record: LeaseRecord) -> None:
        self.desk.let_go(record.lookup)
        self._placement.leave(record)
        for entry in record.entries:
            entry.waiting.pop(record.seq, None)
            entry.holders.pop(record.seq, None)
            self.tidy(entry)
        self._lock.notify_all()
