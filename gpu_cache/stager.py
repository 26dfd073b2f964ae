"""The stager: takes leases from REFs to resident pages. The host verifies and packs, copies follow.

There is one lock, the cache's condition. Methods are called with it held. Under it nothing blocks, no bytes
move and nobody else's code runs; requests to the host are put, marks and waits may be enqueued. The host
answers from threads of its own, each answer takes the lock once.

Bytes come first, then room: what a lease wants is brought into host memory, and then takes its place in VRAM,
all of it at once or nothing. Where there is no room the lease lets go of the host's memory again and waits for
room alone (it is parked); once it has the room, the bytes are asked for anew, and are mostly still there. So who
waits for VRAM holds no host memory, who waits for host memory may hold VRAM, and no two can wait for each other.

Room is handed out by priority, then by age. A waiting lease may take what only leases behind it want, never what
a lease has a claim on (I12). So the first always gets on as leases are released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING

from adapterd.gpu_cache.admission import inadmissible, short_cut
from adapterd.gpu_cache.arrivals import Arrivals, Loads
from adapterd.gpu_cache.asking import Desk, Images
from adapterd.gpu_cache.budgets import queue_full
from adapterd.gpu_cache.claims import Claims
from adapterd.gpu_cache.composition import normalise
from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.copies import CopyQueue
from adapterd.gpu_cache.device import Device
from adapterd.gpu_cache.host.interface import Failure, Host, Origin
from adapterd.gpu_cache.lines import Lines
from adapterd.gpu_cache.pins import no_room_to_prefetch, too_much_kept
from adapterd.gpu_cache.records import Ask, Cause, Entry, LeaseRecord, LeaseState, Place, Purpose
from adapterd.gpu_cache.residency import Ledger
from adapterd.gpu_cache.revocation import Refusals, Scrubber
from adapterd.gpu_cache.shelf import Shelf
from adapterd.gpu_cache.slabs import SlabTensors
from adapterd.gpu_cache.vram_tier import VramTier
from adapterd.gpu_cache.warm import WarmLeases, plain
from adapterd.loader.errors import AdapterdError, Problem
from adapterd.loader.identity import VersionKey

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.sources import Resolved


class Stager:
    """Entries and waiting leases, and every step between absent and resident."""

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
        self._lock, self._vram, self._copies = lock, vram, copies
        self._refusals, self._over = refusals, over
        self.ledger = Ledger(lambda: {*self.entries, *host.usage().images})
        self.desk = Desk(host, slabs, lock, self._answered)
        self._claims = Claims(self.desk, self.ledger, refusals.refusal, self)
        self._arrivals = Arrivals(self.desk, vram, copies, slabs, self)
        self.scrubber = Scrubber(device, vram.arena, config.page_bytes, lock, self._scrubbed)
        self.shelf = Shelf(vram, copies, self._claims, self._arrivals, self.scrubber, self._again)
        self._lines: Lines[LeaseRecord] = Lines()  # for room in VRAM
        self._queued: Counter[str] = Counter()
        self._ended: list[LeaseRecord] = []
        self._tick = 0
        self.found: Counter[Origin | None] = Counter()  # where leases found what they wanted; None is VRAM

    @property
    def entries(self) -> dict[VersionKey, Entry]:
        return self.shelf.entries

    @property
    def loads(self) -> Loads:
        return self._arrivals.loads

    # Leases

    def admit(self, record: LeaseRecord, problems: tuple[Problem, ...] = ()) -> None:
        """Starts a lease. What it names is looked up by the host, unless that is known, or pinned and in VRAM."""
        self._queued[record.tenant] += 1
        if problems:
            self.fail(record, problems)
            return
        known = record.resolved or short_cut(record.asked, record.tenant, record.base, self.entries)
        if known is not None:
            self._attach(record, known)
        most = self._config.tenants.get(record.tenant, self._config.default_budget).max_waiting
        if record.queued and self._queued[record.tenant] > most:
            self.fail(record, (queue_full(record.tenant, most),))
        elif record.state is LeaseState.RESOLVING:
            refs = [asked.ref for asked in record.asked]
            record.lookup = self.desk.resolve(refs, record.tenant, partial(self._resolved, record))

    def warm(self, seen: WarmLeases, record: LeaseRecord, wish: object) -> bool:
        """Whether a new lease could be made ready the short way."""
        if not seen.fill(record, wish, self.desk.trust_changes, self._tick + 1):
            return False
        self._tick += 1
        self.found[None] += 1
        return True

    def fail(self, record: LeaseRecord, problems: tuple[Problem, ...]) -> None:
        self._move(record, LeaseState.FAILED)
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
                if not entry.tidy:
                    self.tidy(entry)
            self.advance()
            return
        self._move(record, LeaseState.RELEASED)
        self._detach(record)
        self.advance()

    def pause(self, record: LeaseRecord) -> None:
        """It holds nothing, and remembers what it was on."""
        if record.live and record.state is not LeaseState.PAUSED:
            self._move(record, LeaseState.PAUSED)
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

    def advance(self) -> None:
        """Something came free, or came in: let those who wait for room try, in their order."""
        if self._lines:
            self._lines.serve(self._place)
        self._lock.notify_all()

    def poll(self) -> None:
        """Notices the copies that have completed or were refused."""
        if not self._copies.news:
            self.finish()
            return
        landed, lost = self._copies.landed(), self._copies.lost()
        for each in landed:
            self._arrivals.land(each)
        for refused in lost:
            self.shelf.forget(refused.entry)
            self._arrivals.lose(refused)
        if landed or lost:
            self.advance()
        self.finish()

    def finish(self) -> None:
        """Lets go of what ends by itself, and has."""
        while self._ended:
            self._over(self._ended.pop())

    def _answered(self) -> None:
        self.advance()
        self.finish()

    def forget_all(self) -> None:
        """The base was reloaded: no entry is found any more, and every slot is stale at once (I16)."""
        for entry in list(self.entries.values()):
            self.shelf.bury(entry, Cause.RELOAD)

    def tidy(self, entry: Entry) -> None:
        self.shelf.tidy(entry)

    def _scrubbed(self, entry: Entry) -> None:
        self.tidy(entry)
        self.advance()

    def _attach(self, record: LeaseRecord, found: Sequence[Resolved]) -> None:
        """The lease knows its versions now."""
        record.resolved = tuple(found)
        keys = [VersionKey(record.tenant, record.base, each.version_digest) for each in found]
        for key, each in zip(keys, found, strict=True):
            refusal = self._refusals.refusal(each, self.ledger.publisher(key, each))
            if refusal is not None:
                self.fail(record, (refusal,))
                return
        try:
            record.components = normalise(zip(keys, (a.weight for a in record.asked), strict=True))
        except AdapterdError as failure:
            self.fail(record, failure.problems)
            return
        chosen = {c.key: self.shelf.entry(c.key) for c in record.components}
        record.entries = tuple(chosen.values())
        pairs = zip(keys, found, strict=True)
        record.claims = tuple((chosen[key], each) for key, each in pairs if key in chosen)
        record.state = LeaseState.WAITING
        for entry in record.entries:
            if entry.place is Place.ABSENT:
                record.unseen.add(entry)
            else:
                self.found[None] += 1
            entry.waiting[record.seq] = record
        self.touch(record.entries)
        self.proceed(record)

    def _move(self, record: LeaseRecord, state: LeaseState) -> None:
        before, record.state = record.queued, state
        self._queued[record.tenant] -= before and not record.queued
        if not self._queued[record.tenant]:
            del self._queued[record.tenant]

    def _detach(self, record: LeaseRecord) -> None:
        self._lines.remove(record)
        self.desk.let_go(record.lookup)
        self._let_go(record)
        for entry in record.entries:
            entry.waiting.pop(record.seq, None)
            entry.holders.pop(record.seq, None)
            self.tidy(entry)
        self._lock.notify_all()

    def _let_go(self, record: LeaseRecord) -> None:
        """Of what the host holds for the lease, or is about to."""
        self.desk.let_go(record.fetch)
        record.fetch, record.images = None, {}

    # From versions to room

    def proceed(self, record: LeaseRecord) -> None:
        """Does whatever can be done now for a lease that waits, but for room: that is handed out by `advance`."""
        if record.state is not LeaseState.WAITING:
            return
        vram = self._vram
        problem = inadmissible(record, vram.budget, vram.slot_shares, self._config.max_composition_rank)
        problem = problem or too_much_kept(record, self.entries.values(), vram.budget, vram.slot_shares)
        if problem is not None:
            self.fail(record, (problem,))
            return
        if not self._claims.hold(record):
            return
        missing = record.missing
        if not missing:
            self._grant(record)
        elif record.images or record.parked:
            self._lines.add(record)
        elif record.fetch is None:
            wanted = {entry: found for entry, found in record.claims if entry in missing}
            then = partial(self._fetched, record, list(wanted))
            record.fetch = self.desk.fetch(list(wanted.values()), record, then)

    def _place(self, record: LeaseRecord) -> bool:
        """Whether the lease waits for room no longer: all that it misses has some now, or it is verified again."""
        if not self._claims.hold(record):
            return True
        missing = record.missing
        brief = record.purpose.brief
        gives_way = brief and len(self._lines) > 1  # others wait for room, too
        evicted = [] if not missing else None if gives_way else self._vram.make_room(record)
        if evicted is None:
            if brief:
                self.fail(record, (no_room_to_prefetch(record),))
            return brief
        for entry in missing:
            self._vram.claim(entry)
        self._grant(record, missing)
        for entry in missing:
            for other in list(entry.waiting.values()):
                self.proceed(other)
        for entry in evicted:
            self.tidy(entry)
        return True

    def _park(self, record: LeaseRecord) -> None:
        for entry, image in record.images.items():
            if image.origin is not Origin.HOST:
                entry.cold = image
        self._let_go(record)
        record.parked = True

    def _grant(self, record: LeaseRecord, claimed: Sequence[Entry] = ()) -> None:
        """From here on the lease pins (I12)."""
        self._move(record, LeaseState.COPYING)
        self._lines.remove(record)
        self.found[None] += len(record.unseen)
        record.unseen.clear()
        for entry in record.entries:
            del entry.waiting[record.seq]
            entry.holders[record.seq] = record
            entry.used = entry.used or not record.purpose.brief
        self._arrivals.bring(record, list(claimed))
        for entry in record.entries:
            self.tidy(entry)
        self._settle(record)

    def _settle(self, record: LeaseRecord) -> None:
        if record.components is not None and all(entry.copied for entry in record.entries):
            pairs = zip(record.entries, record.components, strict=True)
            record.residents = tuple((e.resident, c.weight) for e, c in pairs if e.resident is not None)
            record.state = LeaseState.READY
            if record.purpose.brief:
                self._ended.append(record)
            self._lock.notify_all()

    def arrived(self, entry: Entry) -> None:
        self._vram.changes += 1
        for record in list(entry.holders.values()):
            self._settle(record)
        self.tidy(entry)

    # What the host is asked, and what becomes of its answers

    def _resolved(self, record: LeaseRecord, ask: Ask, outcome: tuple[Resolved, ...] | Failure) -> None:
        if record.lookup is not ask or not record.live:
            return
        record.lookup = None
        if isinstance(outcome, Failure):
            self.fail(record, outcome.problems)
            return
        for asked, found in zip(record.asked, outcome, strict=True):
            self.ledger.named(asked.ref, VersionKey(record.tenant, record.base, found.version_digest))
        self._attach(record, outcome)

    def _fetched(self, record: LeaseRecord, entries: list[Entry], ask: Ask, outcome: Images | Failure) -> None:
        if record.fetch is not ask:
            return
        if isinstance(outcome, Failure):
            for entry in entries:
                entry.verified.clear()
            self.fail(record, outcome.problems)
            return
        record.images = dict(zip(entries, outcome, strict=True))
        for entry, image in record.images.items():
            self.found[image.origin] += entry in record.unseen
            record.unseen.discard(entry)
        if record.purpose is Purpose.TO_HOST:
            self._ended.append(record)
            return
        self.proceed(record)
        self.advance()
        if record.images:  # no room, or somebody's turn comes first
            self._park(record)
