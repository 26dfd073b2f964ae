"""The face of the cache: acquire, step, release. See `stager` for how bytes get to where they are wanted.

Locking: one condition guards all books (entries, leases, pages, slots, budgets). Calls on the serving
thread hold it for bookkeeping only; they never wait for I/O or for the device (I14). Copies are enqueued
outside it. Locks below it: the host's, and leaves such as a CPU stream's queue; the host answers without its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from adapterd.gpu_cache.composition import Wish
from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.device import Device, open_device
from adapterd.gpu_cache.eviction import GuardedPolicy, Policy
from adapterd.gpu_cache.following import Following
from adapterd.gpu_cache.host.interface import Host
from adapterd.gpu_cache.host.opening import open_host
from adapterd.gpu_cache.leases import Lease, check_ready
from adapterd.gpu_cache.records import Entry, LeaseRecord, LeaseState
from adapterd.gpu_cache.statistics import CacheStatistics, snapshot
from adapterd.gpu_cache.tickets import StepTicket
from adapterd.gpu_cache.upkeep import Upkeep
from adapterd.gpu_cache.vram_tier import VramTier
from adapterd.gpu_cache.waiting import Waiting
from adapterd.loader.errors import AdapterdError, Code, error, reject

if TYPE_CHECKING:
    import torch

    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.sources import Source
    from adapterd.loader.trust.policy import TrustStore

ANSWERS_A_STEP = 1
"""Of the host, that a step hears behind its launch. What then has to go, and where the bytes go, is the next one's."""


class AdapterCache(Upkeep, Following, Waiting):
    """Adapters of one base model in the memory of one device. A context manager: opened once, closed once."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        base: BaseSpec,
        source: Source | None = None,
        trust: TrustStore | None = None,
        device: Device | None = None,
        host: Host | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Allocates arena and slab.

        Args:
            base: the base model that this process runs.
            source, trust: where versions come from, and whom to believe; needed unless `host` is given.
            device: else that of the configuration. A given one is not closed with the cache.
            host: else what the configuration asks for, over `source`. Made for this cache and closed with it; its
                pages are as large as the configuration says, and `base` is its base.
            policy: who has to go for others; else the least recently used, which also take its place whenever it
                fails (`policy_faults` of `statistics`).

        Raises:
            AdapterdError: SETTINGS_INVALID, DEVICE_ERROR, STORAGE_UNAVAILABLE.
        """
        config.sharding.check(base)
        self._owns_device = device is None
        device = device or open_device(config.device)
        policy = GuardedPolicy.of(policy)  # one for both memories, so that its faults are counted together
        vram = VramTier(device, config, policy)
        with ExitStack() as cleanup:
            if host is None:
                host = cleanup.enter_context(open_host(config, device, source, trust, base, policy))
            else:
                cleanup.callback(host.close, config.close_seconds)
            super().__init__(config, base, device, vram, host)
            self._cleanup = cleanup.pop_all()

    @property
    def base(self) -> BaseSpec:
        return self._stager.base

    @property
    def config(self) -> CacheConfig:
        return self._config

    @property
    def device(self) -> Device:
        return self._device

    @property
    def arena(self) -> torch.Tensor:
        """uint8 [vram_pages × page_bytes] on the device; its address never changes (I22)."""
        return self._vram.arena

    def __enter__(self) -> Self:
        with self._lock:
            if self._opened:
                raise RuntimeError("a cache is opened once")
            self._opened = True
        self._copies.open()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        """Fails what waits (CACHE_CLOSED), drops queued loads and ends all threads.

        Loads that run find out at their next block; for those that hang it waits `close_seconds` at most.
        """
        with self._lock:
            self._closed = True
            self._routes.close()
            self._fail_all(reject(Code.CACHE_CLOSED, "cache", "the cache was closed"))
            self._stager.finish()
        if self._owns_device:
            self._device.close()
        self._cleanup.close()

    # Leases

    def acquire(self, wish: Wish, *, tenant: str, priority: int = 0) -> Lease:
        """A lease on a REF, a composition, or the base (None). Returns at once (I14).

        Among leases that wait for memory the higher priority goes first, then the older.

        What is wrong with the request or the adapter makes the lease fail, with the reason in
        `lease.problem`; it fails no other request (I17). Another tenant's REF fails as an unknown one.

        Raises:
            Failed: CACHE_CLOSED.
        """
        with self._lock:
            self._check_open()
            self._notice()
            lease = self._lease(self._warm(wish, tenant, priority) or self._cold(wish, tenant, priority))
        self._issue_if_idle()
        return lease

    def release(self, record: LeaseRecord) -> None:
        """For `Lease.release`. Idempotent."""
        with self._lock:
            self._release(record)
        self._host.deliver()

    def pause(self, record: LeaseRecord) -> None:
        """For `Lease.pause`."""
        with self._lock:
            self._stager.pause(record)

    def resume(self, record: LeaseRecord) -> None:
        """For `Lease.resume`."""
        with self._lock:
            self._notice()
            self._stager.resume(record)
        self._issue_if_idle()

    # Steps

    def begin_step(self, leases: Sequence[Lease | None]) -> StepTicket:
        """Pins what the step reads, and makes the compute stream wait for the copies that filled it (I13).

        None stands for base rows. All or nothing: if a lease cannot be used, nothing is pinned.

        Raises:
            AdapterdError: the failure of a failed lease, LEASE_NOT_READY, LEASE_RELEASED, SLOT_STALE,
                CACHE_CLOSED.
        """
        stream = self._device.compute
        with self._lock:
            self._check_open()
            self._routes.turn()
            entries = self._usable(leases)
            for entry in entries:
                entry.tickets += 1
            self._steps += 1
            self._stager.touch(entries)
        ticket = StepTicket(self, stream, entries)
        self._join(ticket)
        return ticket

    def end_step(self, ticket: StepTicket) -> None:
        """For `StepTicket.end`. The mark is recorded under the lock: marks are noted in stream order.

        If the device refuses it, the step is over all the same, but what it read is in flight for ever.
        """
        with self._lock:
            self._steps -= 1
            event = self._device.record(ticket.stream)
            self._last_step = event
            for entry in ticket.entries:
                entry.tickets -= 1
                entry.readers.note(ticket.stream, event)
                if entry.dead:
                    self._stager.tidy(entry)
            self._routes.turn()
            self._notice()
            self._stager.advance()
            if self._closed:
                return
        self._stager.line_up(True)
        try:
            self._host.deliver(ANSWERS_A_STEP)
        finally:
            self._stager.line_up(False)
        self._stager.scrubber.issue()
        self._copies.issue(self._config.pages_per_step)

    def rebind(self, base: BaseSpec) -> None:
        """The base model was reloaded: every lease fails (SLOT_STALE), and no entry of the old base serves again.

        Call it before the first forward of the new base (I16). Steps in flight may finish; the pages they
        read are reused only after their marks.

        Raises:
            Failed: SETTINGS_INVALID if the sharding does not fit the new base; nothing has changed then.
        """
        self._config.sharding.check(base)
        with self._lock:
            self._stager.base = base
            self._host.rebase(base)
            what = f"the base was reloaded: {base.id}@{base.revision}"
            self._fail_all(reject(Code.SLOT_STALE, "base", what, "Acquire again."))
            self._stager.forget_all()

    def statistics(self) -> CacheStatistics:
        usage = self._host.usage()
        with self._lock:
            count = snapshot(self._vram, usage, self._stager, self._book, self._steps)
        return count()

    # With the lock held

    def _usable(self, leases: Sequence[Lease | None]) -> tuple[Entry, ...]:
        """What a step with these leases reads, each once. Raises what keeps any of them from being used."""
        current, found = self._vram.slots.current, dict[int, Entry]()
        for lease in leases:
            if lease is None:
                continue
            record = lease.record
            if record.state is not LeaseState.READY:
                check_ready(record)
            if not lease.belongs_to(self):
                raise error(
                    Code.SLOT_STALE, " + ".join(str(asked.ref) for asked in record.asked) or "base",
                    "the lease is another cache's", "Acquire it from the cache that the step reads.",
                )  # fmt: skip
            for resident, _ in record.residents:
                if not current(resident):
                    raise error(
                        Code.SLOT_STALE, f"sha256:{resident.key.digest}",
                        f"slot {resident.slot} is past generation {resident.generation}", "Acquire again.",
                    )  # fmt: skip
            for entry in record.entries:
                found[id(entry)] = entry
        return tuple(found.values())

    # Without the lock

    def _join(self, ticket: StepTicket) -> None:
        """Readers wait for the copies, though `ready` has seen their marks: stream order is the guarantee."""
        try:
            for entry in ticket.entries:
                if entry.joined != ticket.stream:
                    for event in entry.copied_by.events:
                        self._device.wait(ticket.stream, event)
                    entry.joined = ticket.stream
        except AdapterdError:
            ticket.end()
            raise

    def _issue_if_idle(self) -> None:
        """Copies in front of a launch cost decode 1.57× on p50: while steps run, only steps issue them."""
        self._host.deliver()
        if self._closed or not self._opened or not (self._copies.waiting or self._stager.scrubber.waiting):
            return
        if self._stager.scrubber.waiting:
            self._stager.scrubber.issue()
        with self._lock:
            if self._stepping or self._closed or not self._opened:
                return
        self._copies.issue(None)
