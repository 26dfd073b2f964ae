"""The stager: takes leases from REFs to resident pages. Loader threads verify and pack, copies follow.

There is one lock, the cache's condition. Methods are called with it held, but for the loader jobs. Under it
nothing blocks, no bytes move and nobody else's code runs; marks and waits may be enqueued. A loader job
takes it once, to say how it ended.

Memory is handed out by age. A waiting lease may take what only younger waiting leases want (never what a
lease has a claim on, I12), in the arena all its pages at once or none. So the oldest always gets on as
leases are released, and compositions cannot block each other by holding halves. Within a tenant a lease
that waits for memory holds up the younger ones that need some, so that a large adapter is not starved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING

from adapterd.gpu_cache.admission import inadmissible, resolve_all, short_cut
from adapterd.gpu_cache.composition import normalise
from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.copies import CopyQueue, Lost, Transfer
from adapterd.gpu_cache.host.jobs import Failure, LoaderJobs, check_wanted
from adapterd.gpu_cache.host.loading import Loader, Prepared
from adapterd.gpu_cache.host.pool import LoaderPool
from adapterd.gpu_cache.host.tier import HostTier
from adapterd.gpu_cache.records import Entry, LeaseRecord, LeaseState, Place, Verified, claim_of
from adapterd.gpu_cache.vram_tier import VramTier
from adapterd.loader.errors import AdapterdError, Problem
from adapterd.loader.identity import VersionKey

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.sources import Resolved

Blocked = set[tuple[str, str]]
"""(memory, tenant) for which a lease of this pass waits already."""


class Stager:
    """Entries and waiting leases, and every step between absent and resident."""

    def __init__(
        self,
        config: CacheConfig,
        base: BaseSpec,
        *,
        lock: Condition,
        loader: Loader,
        pool: LoaderPool,
        host: HostTier,
        vram: VramTier,
        copies: CopyQueue,
    ) -> None:
        self._config, self.base = config, base
        self._lock, self._loader = lock, loader
        self._jobs = LoaderJobs(pool, lock, self.advance)
        self._host, self._vram, self._copies = host, vram, copies
        self.entries: dict[VersionKey, Entry] = {}
        self._waiting: dict[int, LeaseRecord] = {}  # resolved, without a claim on pages
        self._tick = 0
        self.found: Counter[Place] = Counter()  # where acquires found what they wanted

    # Leases

    def admit(self, record: LeaseRecord) -> None:
        """Starts a new lease. What it names is looked up on a loader thread, unless it is pinned and here."""
        known = short_cut(record.asked, record.tenant, record.base, self.entries)
        if known is not None:
            self._attach(record, known)
        else:
            self._resolve(record)

    def fail(self, record: LeaseRecord, problems: tuple[Problem, ...]) -> None:
        record.state, record.problems = LeaseState.FAILED, problems
        self._detach(record)

    def release(self, record: LeaseRecord) -> None:
        """Cancels what only this lease waited for. What is resident stays until room is needed."""
        record.state = LeaseState.RELEASED
        self._detach(record)
        self.advance()

    def touch(self, entries: Sequence[Entry]) -> None:
        self._tick += 1
        for entry in entries:
            entry.last_used = self._tick

    def advance(self) -> None:
        """Something came free, or came in: let every waiting lease try, oldest first."""
        blocked: Blocked = set()
        for seq in sorted(self._waiting):  # they were resolved in any order
            record = self._waiting.get(seq)
            if record is not None:
                self._try(record, blocked)
        self._lock.notify_all()

    def poll(self) -> None:
        """Notices the copies that have completed or were refused."""
        landed = self._copies.landed()
        for entry in landed:
            self._land(entry)
        lost = self._copies.lost()
        for each in lost:
            self._lose(each)
        if landed or lost:
            self.advance()

    def forget_all(self) -> None:
        """The base was reloaded: no entry is found any more, and every slot is stale at once (I16)."""
        doomed = list(self.entries.values())
        self.entries.clear()
        for entry in doomed:
            entry.dead = True
            if entry.resident is not None:
                self._vram.slots.revoke(entry.resident.slot)
            self.tidy(entry)

    def tidy(self, entry: Entry) -> None:
        """Gives back what an entry holds for nobody. Does nothing while anything is in flight for it."""
        if entry.wanted or entry.in_flight:
            return
        if entry.dead and entry.resident is not None:
            self._vram.evict(entry)
        if entry.image is not None and (entry.dead or not self._config.keep_host):
            self._host.drop(entry)
        if entry.place is Place.ABSENT and self.entries.get(entry.key) is entry:
            del self.entries[entry.key]

    def _attach(self, record: LeaseRecord, found: Sequence[Resolved]) -> None:
        """The lease knows its versions now."""
        keys = [VersionKey(record.tenant, record.base, each.version_digest) for each in found]
        try:
            record.components = normalise(zip(keys, (a.weight for a in record.asked), strict=True))
        except AdapterdError as failure:
            self.fail(record, failure.problems)
            return
        chosen = {c.key: self.entries.setdefault(c.key, Entry(c.key)) for c in record.components}
        record.entries = tuple(chosen.values())
        pairs = zip(keys, found, strict=True)
        record.claims = tuple((chosen[key], each) for key, each in pairs if key in chosen)
        record.state = LeaseState.WAITING
        self._waiting[record.seq] = record
        for entry in record.entries:
            self.found[entry.place] += 1
            entry.waiting[record.seq] = record
        self.touch(record.entries)
        self._try(record, set())

    def _detach(self, record: LeaseRecord) -> None:
        self._waiting.pop(record.seq, None)
        for entry in record.entries:
            entry.waiting.pop(record.seq, None)
            entry.holders.pop(record.seq, None)
            self.tidy(entry)
        self._lock.notify_all()

    # From versions to pages

    def _try(self, record: LeaseRecord, blocked: Blocked) -> None:
        """Does whatever can be done for a waiting lease now."""
        limit = self._config.max_composition_rank
        problem = inadmissible(record, self._vram.budget, self._host.budget, limit)
        if problem is not None:
            self.fail(record, (problem,))
            return
        verified = [self._verify(entry, resolved) for entry, resolved in record.claims]
        here = [self._fetch(entry, record.seq, blocked) for entry in record.entries]
        if all(verified) and all(here) and self._place(record, blocked):
            self._grant(record)

    def _verify(self, entry: Entry, resolved: Resolved) -> bool:
        """Whether the loader has verified that claim by what is trusted now; if not, it is at it.

        Equal claims share one job. After a change of trust even what is resident is verified again, once.
        """
        claim = claim_of(resolved)
        known = entry.verified.get(claim)
        if known is not None and known.trust_changes == self._loader.trust_changes:
            return True
        if claim not in entry.checking:
            entry.checking.add(claim)
            self._prepare(entry, resolved, self.base)
        return False

    def _fetch(self, entry: Entry, seq: int, blocked: Blocked) -> bool:
        """Whether the bytes are in the slab or the arena; if not, and there is room, the loader packs them."""
        if entry.filled or entry.resident is not None:
            return True
        if entry.prepared is None or entry.filling or ("host", entry.key.tenant) in blocked:
            return False
        dropped = self._host.make_room(entry, seq, self.entries.values())
        if dropped is None:
            blocked.add(("host", entry.key.tenant))
            return False
        pages = self._host.take(entry)
        entry.filling = True
        self._fill(entry, entry.prepared, pages)
        self._tidy_all(dropped)
        return False

    def _place(self, record: LeaseRecord, blocked: Blocked) -> bool:
        """Pages and slots for all of the lease's entries that have none, and their copies queued; or nothing."""
        missing = [entry for entry in record.entries if entry.resident is None]
        if not missing:
            return True
        if ("vram", record.tenant) in blocked:
            return False
        evicted = self._vram.make_room(missing, record.seq, self.entries.values())
        if evicted is None:
            blocked.add(("vram", record.tenant))
            return False
        for entry in missing:
            assert entry.image is not None
            self._copies.add(Transfer(entry, entry.image, self._vram.take(entry)))
        self._tidy_all(evicted)
        return True

    def _grant(self, record: LeaseRecord) -> None:
        """From here on the lease pins (I12)."""
        record.state = LeaseState.COPYING
        del self._waiting[record.seq]
        for entry in record.entries:
            del entry.waiting[record.seq]
            entry.holders[record.seq] = record
        self._settle(record)

    def _settle(self, record: LeaseRecord) -> None:
        if record.components is not None and all(entry.copied for entry in record.entries):
            pairs = zip(record.entries, record.components, strict=True)
            record.residents = tuple((e.resident, c.weight) for e, c in pairs if e.resident is not None)
            record.state = LeaseState.READY
            self._lock.notify_all()

    def _land(self, entry: Entry) -> None:
        entry.copied = True
        if not self._config.keep_host:
            self._host.drop(entry)
        for record in list(entry.holders.values()):
            self._settle(record)
        self.tidy(entry)

    def _lose(self, lost: Lost) -> None:
        """What was enqueued may still touch its pages, in the arena and in the slab: they are never used again."""
        entry = lost.entry
        entry.dead = True
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
        for record in [*entry.holders.values(), *entry.waiting.values()]:
            self.fail(record, lost.problems)

    def _tidy_all(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.tidy(entry)

    # Loader jobs: `work` runs without the lock, on a loader thread

    def _resolve(self, record: LeaseRecord) -> None:
        def work() -> tuple[Resolved, ...]:
            check_wanted(record.live, "lease")
            return resolve_all(self._loader, record.asked, record.tenant)

        self._jobs.start(record.tenant, work, partial(self._resolved, record))

    def _prepare(self, entry: Entry, resolved: Resolved, base: BaseSpec) -> None:
        def work() -> Prepared:
            check_wanted(entry.wanted, str(resolved.ref))
            return self._loader.prepare(resolved, base, lambda: not entry.wanted)

        before = self._loader.trust_changes
        self._jobs.start(entry.key.tenant, work, partial(self._prepared, entry, Verified(resolved, before)))

    def _fill(self, entry: Entry, prepared: Prepared, pages: tuple[int, ...]) -> None:
        def work() -> None:
            check_wanted(entry.wanted, f"sha256:{entry.key.digest}")
            self._host.write(prepared, pages)

        self._jobs.start(entry.key.tenant, work, partial(self._filled, entry))

    # How they ended. What was cancelled but is wanted again is started anew by the `advance` that follows.

    def _resolved(self, record: LeaseRecord, outcome: tuple[Resolved, ...] | Failure) -> None:
        if not record.live:
            return
        if isinstance(outcome, Failure):
            self.fail(record, outcome.problems)
        else:
            self._attach(record, outcome)

    def _prepared(self, entry: Entry, verified: Verified, outcome: Prepared | Failure) -> None:
        """A claim that does not hold fails those who made it, and nobody else (I17)."""
        claim = claim_of(verified.resolved)
        entry.checking.discard(claim)
        if not isinstance(outcome, Failure):
            entry.verified[claim] = verified
            entry.prepared = entry.prepared or outcome
        elif not outcome.cancelled:
            for record in list(entry.waiting.values()):
                if any(e is entry and claim_of(r) == claim for e, r in record.claims):
                    self.fail(record, outcome.problems)
        self.tidy(entry)

    def _filled(self, entry: Entry, outcome: Failure | None) -> None:
        """Bytes that do not hold fail all who wait for them; the next acquire verifies everything anew."""
        entry.filling = False
        if outcome is None:
            entry.filled = True
        else:
            self._host.drop(entry)
            if not outcome.cancelled:
                entry.prepared = None
                entry.verified.clear()
                for record in list(entry.waiting.values()):
                    self.fail(record, outcome.problems)
        self.tidy(entry)
