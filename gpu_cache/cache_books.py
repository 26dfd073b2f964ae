"""What all parts of a cache share: its books, and what is done with them while the lock is held."""

from __future__ import annotations

from abc import abstractmethod
from threading import Condition, Lock
from typing import TYPE_CHECKING

from adapterd.gpu_cache.composition import Asked, Wish, parse_wish
from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.copies import CopyQueue
from adapterd.gpu_cache.device import Device, Event
from adapterd.gpu_cache.host.interface import Host, HostUsage
from adapterd.gpu_cache.lease_book import LeaseBook
from adapterd.gpu_cache.leases import Lease, LeaseBooks
from adapterd.gpu_cache.pins import Pins
from adapterd.gpu_cache.records import LeaseRecord, LeaseState, Purpose
from adapterd.gpu_cache.revocation import Refusals, Revoker
from adapterd.gpu_cache.routes import Routes
from adapterd.gpu_cache.slabs import SlabTensors
from adapterd.gpu_cache.stager import Stager
from adapterd.gpu_cache.vram_tier import VramTier
from adapterd.gpu_cache.warm import Meaning, WarmLeases
from adapterd.loader.errors import AdapterdError, Code, Problem, error, reject

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.sources import Resolved

Parsed = tuple[tuple[Asked, ...], tuple[Problem, ...]]
DRAINING = (reject(Code.CACHE_DRAINING, "cache", "the cache takes no new leases", "Ask another worker."),)


class CacheBooks(LeaseBooks):
    """Base of `AdapterCache` and of the rooms that its surface is divided into. Locking: see `cache`."""

    def __init__(self, config: CacheConfig, base: BaseSpec, device: Device, vram: VramTier, host: Host) -> None:
        """Raises Unavailable (DEVICE_ERROR)."""
        self._config, self._device, self._vram, self._host = config, device, vram, host
        self._lock = Condition(Lock())
        self._copies = CopyQueue(device, vram.arena, config.page_bytes, self._lock)
        self._book, self._routes, refusals = LeaseBook(), Routes(), Refusals()
        self._stager = Stager(
            config,
            base,
            lock=self._lock,
            host=host,
            device=device,
            vram=vram,
            copies=self._copies,
            slabs=SlabTensors(device, host.slab),
            refusals=refusals,
            over=self._over,
        )
        self._refusals = refusals
        self._revoker = Revoker(refusals, self._stager.ledger, self._book, host, self._stager.shelf, self._stager)
        self._pins = Pins()
        self._seen = WarmLeases(2 * config.max_residents)
        self._looking = Lock()  # guards the next two; a leaf, which serving never takes
        self._host_seen = HostUsage({}, 0, {})  # as of the last look
        self._host_changes = 0
        self._opened = self._closed = self._draining = False
        self._steps = 0  # in flight
        self._last_step: Event | None = None
        self._looked_at = False  # somebody looks at copies often

    @abstractmethod
    def _issue_if_idle(self) -> None:
        """Enqueues what may be enqueued now. Without the lock."""

    def _parsed(self, wish: Wish) -> Parsed:
        try:
            return parse_wish(wish, self._config.max_components), ()
        except AdapterdError as failure:
            return (), failure.problems

    # With the lock held

    def _check_open(self) -> None:
        if self._closed or not self._opened:
            raise error(Code.CACHE_CLOSED, "cache", "the cache is not open", "Use it inside `with cache:`.")

    def _notice(self) -> None:
        if self._book.dropped:
            for record in self._book.found():
                self._release(record)
        self._stager.poll()
        if not self._steps:
            self._routes.turn()

    def _begin(
        self,
        tenant: str,
        parsed: Parsed,
        priority: int = 0,
        purpose: Purpose = Purpose.USE,
        resolved: tuple[Resolved, ...] = (),
        meaning: Meaning | None = None,
    ) -> LeaseRecord:
        """A new lease; `resolved` is what it means, if that is known, and `meaning` what it meant the last time."""
        asked, problems = parsed
        record = self._book.new(tenant, self._stager.base.pin, asked, priority, purpose)
        record.resolved = resolved
        self._stager.admit(record, problems or (DRAINING if self._draining else ()), meaning)
        return record

    def _warm(self, wish: Wish | int, tenant: str, priority: int) -> LeaseRecord | None:
        """A new lease on what is known to be in VRAM."""
        if self._draining or not self._seen.knows(tenant, wish):
            return None
        record = self._book.new(tenant, self._stager.base.pin, (), priority)
        if self._stager.warm(self._seen, record, wish):
            return record
        self._book.forget(record)
        return None

    def _cold(self, wish: Wish, tenant: str, priority: int) -> LeaseRecord:
        """A new lease, by all that has to be asked and decided."""
        meaning = self._seen.meaning(tenant, wish, self._stager.base.pin)
        parsed = self._parsed(wish) if meaning is None else (meaning.asked, ())
        record = self._begin(tenant, parsed, priority, meaning=meaning)
        if meaning is None or record.state is LeaseState.READY:
            self._seen.remember(wish, record)
        return record

    def _lease(self, record: LeaseRecord) -> Lease:
        """At once: whatever comes next, the record has an owner."""
        return Lease(self, record, self._book.dropped)

    def _over(self, record: LeaseRecord) -> None:
        """It ends by itself. A failed one keeps its reason."""
        if self._book.strike(record) and record.live:
            record.brought = True
            self._stager.release(record)

    def _release(self, record: LeaseRecord) -> None:
        if self._book.strike(record):
            self._stager.release(record)

    def _fail_all(self, problem: Problem) -> None:
        for record in self._book.live():
            self._stager.fail(record, (problem,))
