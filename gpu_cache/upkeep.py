"""What operators and routers do with a cache, beside leases and steps."""

from __future__ import annotations

from typing import Literal

from adapterd.gpu_cache.cache_books import CacheBooks
from adapterd.gpu_cache.composition import Asked, Wish
from adapterd.gpu_cache.host.interface import Progress, Stage
from adapterd.gpu_cache.host.resolving import missing
from adapterd.gpu_cache.pins import KeptLease, Pin
from adapterd.gpu_cache.records import LeaseRecord, LeaseState, Purpose
from adapterd.gpu_cache.residency import Residence, look, residences
from adapterd.loader.errors import Code, error
from adapterd.loader.identity import Ref, VersionKey


class Upkeep(CacheBooks):
    """Part of `AdapterCache`. Thread-safe; nothing here blocks."""

    # What the cache holds by itself

    def prefetch(
        self, wish: Wish, *, tenant: str, to: Literal["vram", "host"] = "vram", priority: int = -1
    ) -> KeptLease:
        """Has it brought, and lets go of it when it is there; see `pins` for whose room it may take.

        The result says how far it is; it need not be kept. `to="host"` takes no room in VRAM.

        Raises:
            Failed: CACHE_CLOSED.
        """
        parsed = self._parsed(wish)
        purpose = Purpose.TO_HOST if to == "host" else Purpose.PREFETCH
        with self._lock:
            self._check_open()
            self._notice()
            record = self._begin(tenant, parsed, priority, purpose)
            self._stager.finish()
        self._issue_if_idle()
        return KeptLease(self, record)

    def pin(self, ref: str, *, tenant: str) -> KeptLease:
        """Has the version that `ref` means now brought, and keeps it in VRAM until `unpin`.

        A REF that is pinned already gives the pin that there is, unless that has failed: then it is tried anew.

        Raises:
            Failed: CACHE_CLOSED, REF_INVALID.
        """
        named = Ref.parse(ref)
        with self._lock:
            self._check_open()
            self._notice()
            record = self._pins.get(tenant, named)
            if record is None or not record.live:
                if record is not None:
                    self._release(record)
                record = self._begin(tenant, ((Asked(named, 1.0),), ()), purpose=Purpose.KEEP)
                self._pins.put(tenant, named, record)
        self._issue_if_idle()
        return KeptLease(self, record)

    def unpin(self, ref: str, *, tenant: str) -> bool:
        """Whether it was pinned. It stays where it is until room is needed.

        Raises:
            Failed: REF_INVALID.
        """
        named = Ref.parse(ref)
        with self._lock:
            record = self._pins.take(tenant, named)
            if record is not None:
                self._release(record)
        return record is not None

    def pins(self) -> tuple[Pin, ...]:
        with self._lock:
            return self._pins.rows()

    def evict(self, ref: str, *, tenant: str) -> int:
        """Drops a version from VRAM and from host memory: bytes that came free. It asks nobody what `ref` means.

        Host memory that other workers read, too, comes free when they let go of it.

        Raises:
            NotFound: NOT_FOUND for what is not here, not known by that name, or another tenant's.
            Conflict: ADAPTER_IN_USE while it is leased, pinned, read by a step or being copied.
            Failed: REF_INVALID.
        """
        named = Ref.parse(ref)
        with self._lock:
            self._notice()
            key = self._stager.ledger.find(named, self._stager.base.pin) if named.tenant == tenant else None
            images = self._host.usage().images
            entry = None if key is None else self._stager.entries.get(key)
            if key is None or (entry is None and key not in images):
                raise missing(named)
            if entry is not None and (entry.wanted or entry.in_flight):
                raise error(
                    Code.ADAPTER_IN_USE, ref, "it is leased, pinned, read by a step or being copied",
                    "Unpin it, or wait until its leases are released.",
                )  # fmt: skip
            freed = images.get(key, 0)
            if entry is not None:
                freed += entry.pages * self._vram.budget.page_bytes
                self._stager.shelf.evict(entry)
            self._host.forget(key)
            self._stager.advance()
            return freed

    def drain(self, on: bool) -> None:
        """While on, new leases fail at once (CACHE_DRAINING); those that are there go on, paused ones, too.

        Pins and what routes hold are let go of. Routes come back when it ends, pins do not.
        """
        with self._lock:
            was, self._draining = self._draining, on
            if on:
                for record in self._pins.take_all():
                    self._release(record)
                self._routes.close()
            elif was:
                self._routes.refresh()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def drained(self) -> bool:
        """It is draining, no lease is left and no step in flight."""
        with self._lock:
            self._notice()
            return self._draining and not self._book.live() and not self._steps

    # What is where

    def residency(self) -> tuple[Residence, ...]:
        """Every version with bytes in VRAM or host memory, and what is wanted, as of one moment."""
        images = self._host.usage().images
        with self._lock:
            looks, known, base = look(self._stager.entries.values()), self._stager.ledger.copy(), self._stager.base
        return residences(looks, images, base.pin, known, self._vram.budget.page_bytes)

    def loading(self) -> dict[VersionKey, Progress]:
        """The cold loads of this base that run, as of the host's last word. Takes no lock."""
        pin = self._stager.base.pin
        return {key: how for key, how in self._host.loading().items() if key.base == pin}

    def progress(self, record: LeaseRecord) -> Progress | None:
        """For `Lease.progress`."""
        loading = self._host.loading() if record.queued or record.state is LeaseState.COPYING else {}
        found = [loading[entry.key] for entry in record.entries if entry.key in loading]
        if not found:
            return None
        stage = Stage.VERIFY if any(each.stage is Stage.VERIFY for each in found) else Stage.PACK
        known = all(each.total for each in found)
        return Progress(stage, sum(each.done for each in found), sum(each.total for each in found) if known else 0)

    @property
    def residency_version(self) -> int:
        """Grows when a version's tier changes: as long as it stays, `residency` says the same tiers."""
        usage = self._host.usage()
        with self._looking:
            seen, self._host_seen = self._host_seen, usage
            if usage is not seen and usage.images.keys() != seen.images.keys():
                self._host_changes += 1
            changes = self._host_changes
        return self._vram.changes + changes  # a number that only grows is read without the cache's lock
