"""A snapshot of the cache for tests, operators and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from adapterd.gpu_cache.host.interface import HostUsage, Origin
from adapterd.gpu_cache.lease_book import LeaseBook
from adapterd.gpu_cache.records import Cause, LeaseState, Place
from adapterd.gpu_cache.residency import Look, is_kept, look
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
        policy_faults: how often the eviction policy gave no order, in VRAM or in this process's host memory.
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
    policy_faults: int = 0


def snapshot(
    vram: VramTier, host: HostUsage, stager: Stager, book: LeaseBook, steps: int
) -> Callable[[], CacheStatistics]:
    """What these books say, with the cache's lock held; to be counted up by calling the result, without it."""
    looks, states = look(stager.entries.values()), book.states()
    used, free, evictions, found = vram.budget.used.copy(), vram.budget.free, vram.evictions.copy(), stager.found.copy()
    faults = vram.policy.faults
    loads, leaked, released, page_bytes = stager.loads.copy(), book.leaked, book.released, vram.budget.page_bytes

    def count() -> CacheStatistics:
        origins = {origin: found[origin] for origin in Origin}
        leases = Counter(states)
        return CacheStatistics(
            vram_bytes={tenant: pages * page_bytes for tenant, pages in used.items() if pages},
            host_bytes=host.tenants,
            vram_free_bytes=free * page_bytes,
            host_free_bytes=host.free_bytes,
            adapters=_places(looks, host.images),
            leases={state: leases[state] for state in LeaseState} | {LeaseState.RELEASED: released},
            leaked_leases=leaked,
            hits=found[None],
            host_hits=origins[Origin.HOST],
            misses=sum(origins.values()) - origins[Origin.HOST],
            origins=origins,
            loads={origin: loads.origins[origin] for origin in Origin},
            load_seconds={kind: dict(stages) for kind, stages in loads.seconds.items()},
            copied_bytes=loads.copied_bytes,
            evictions={cause: evictions[cause] for cause in Cause},
            steps_in_flight=steps,
            pinned_adapters=sum(map(is_kept, looks)),
            policy_faults=faults,
        )

    return count


def _places(looks: Sequence[Look], images: Collection[VersionKey]) -> dict[Place, int]:
    """Each version counts once, at the place nearest to the engine."""
    here = {key for key, place, *_ in looks if place is not Place.ABSENT}
    places = Counter(place for key, place, *_ in looks if key in here or key not in images)
    places[Place.HOST] = sum(key not in here for key in images)
    return {place: places[place] for place in Place}
