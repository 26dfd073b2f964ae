"""A snapshot of the cache for tests, operators and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adapterd.gpu_cache.budgets import Budget
from adapterd.gpu_cache.lease_book import LeaseBook
from adapterd.gpu_cache.records import Entry, LeaseState, Place


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counts at one moment; bytes are whole pages.

    Attributes:
        vram_bytes, host_bytes: in use, by tenant.
        vram_free_bytes, host_free_bytes: free.
        adapters: versions by place.
        leases: unreleased ones by state, and under `released` how many there have been.
        leaked_leases: dropped without a release, found and released by the cache.
        hits: components found in VRAM or on the way there, when their lease was resolved.
        host_hits: found in the host slab.
        misses: the loader had to be asked.
        steps_in_flight: tickets that are not ended.
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
    steps_in_flight: int


def snapshot(
    vram: Budget,
    host: Budget,
    entries: Iterable[Entry],
    found: Counter[Place],
    book: LeaseBook,
    steps: int,
) -> CacheStatistics:
    """The statistics of these books. With the cache's lock held."""
    places = Counter(entry.place for entry in entries)
    return CacheStatistics(
        vram_bytes=_bytes(vram),
        host_bytes=_bytes(host),
        vram_free_bytes=vram.free * vram.page_bytes,
        host_free_bytes=host.free * host.page_bytes,
        adapters={place: places[place] for place in Place},
        leases=book.count(),
        leaked_leases=book.leaked,
        hits=found[Place.RESIDENT] + found[Place.STAGING],
        host_hits=found[Place.HOST],
        misses=found[Place.ABSENT],
        steps_in_flight=steps,
    )


def _bytes(budget: Budget) -> dict[str, int]:
    return {tenant: pages * budget.page_bytes for tenant, pages in budget.used.items() if pages}
