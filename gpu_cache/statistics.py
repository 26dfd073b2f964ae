"""A snapshot of the cache for tests, operators and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from adapterd.gpu_cache.budgets import Budget
from adapterd.gpu_cache.host.interface import HostUsage, Origin
from adapterd.gpu_cache.lease_book import LeaseBook
from adapterd.gpu_cache.records import Cause, Entry, LeaseState, Place
from adapterd.gpu_cache.stager import Stager
from adapterd.gpu_cache.vram_tier import VramTier
from adapterd.loader.identity import VersionKey


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counts at one moment; bytes are whole pages.

    Attributes:
        vram_bytes, host_bytes: in use, by tenant. Host memory may be shared with other workers.
        vram_free_bytes, host_free_bytes: free.
        adapters: versions by place.
        leases: unreleased ones by state, and under `released` how many there have been.
        leaked_leases: dropped without a release, found and released by the cache.
        hits: components found in VRAM or on the way there.
        host_hits: found in the host slab.
        misses: found in neither.
        origins: where the components that were not in VRAM were found; `host_hits` and `misses` are its sums.
        loads: copies into VRAM, by where the bytes had been.
        load_seconds: of these, by `cold` (not in host memory) and `steady` (there), and by stage: `verify`, `pack`,
            `copy`.
        copied_bytes: into VRAM, by these loads.
        evictions: from VRAM, by cause.
        steps_in_flight: tickets that are not ended.
        pinned_adapters: versions that a pin or a route holds, or waits for.
    """

    vram_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    vram_free_bytes: int
    host_free_bytes: int
    adapters: Mapping[Place, int]
    leases: Mapping[LeaseState, int]
    leaked_leases: int
    hits: int
    host_hits: int
    misses: int
    origins: Mapping[Origin, int]
    loads: Mapping[Origin, int]
    load_seconds: Mapping[str, Mapping[str, float]]
    copied_bytes: int
    evictions: Mapping[Cause, int]
    steps_in_flight: int
    pinned_adapters: int = 0


def snapshot(vram: VramTier, host: HostUsage, stager: Stager, book: LeaseBook, steps: int) -> CacheStatistics:
    """The statistics of these books. With the cache's lock held."""
    origins = {origin: stager.found[origin] for origin in Origin}
    return CacheStatistics(
        vram_bytes=_bytes(vram.budget),
        host_bytes=host.tenants,
        vram_free_bytes=vram.budget.free * vram.budget.page_bytes,
        host_free_bytes=host.free_bytes,
        adapters=_places(stager.entries, host),
        leases=book.count(),
        leaked_leases=book.leaked,
        hits=stager.found[None],
        host_hits=origins[Origin.HOST],
        misses=sum(origins.values()) - origins[Origin.HOST],
        origins=origins,
        loads={origin: stager.loads.origins[origin] for origin in Origin},
        load_seconds={kind: dict(stages) for kind, stages in stager.loads.seconds.items()},
        copied_bytes=stager.loads.copied_bytes,
        evictions={cause: vram.evictions[cause] for cause in Cause},
        steps_in_flight=steps,
        pinned_adapters=sum(entry.kept for entry in stager.entries.values()),
    )


def _places(entries: Mapping[VersionKey, Entry], host: HostUsage) -> dict[Place, int]:
    """Each version counts once, at the place nearest to the engine."""
    places = Counter(e.place for key, e in entries.items() if e.claimed or key not in host.images)
    places[Place.HOST] = sum(not (key in entries and entries[key].claimed) for key in host.images)
    return {place: places[place] for place in Place}


def _bytes(budget: Budget) -> dict[str, int]:
    return {tenant: pages * budget.page_bytes for tenant, pages in budget.used.items() if pages}
