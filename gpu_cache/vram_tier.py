"""The arena: pages, slots and budgets of what is in VRAM. Touches no bytes; `copies` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from adapterd.gpu_cache.budgets import Budget
from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.device import Device
from adapterd.gpu_cache.eviction import Candidate, Policy, plan_evictions
from adapterd.gpu_cache.fences import Readers
from adapterd.gpu_cache.pages import Allotment, PagePool
from adapterd.gpu_cache.records import Entry
from adapterd.gpu_cache.slots import Resident, SlotTable

if TYPE_CHECKING:
    import torch


class VramTier:
    """Who has which pages and slots. Methods need the cache's lock."""

    def __init__(self, device: Device, config: CacheConfig, policy: Policy) -> None:
        self._policy = policy
        self.budget = Budget("vram", config.vram_pages, config.page_bytes, config.tenants, config.default_budget)
        self.slots = SlotTable(config.max_residents)
        self._pool = PagePool(config.vram_pages)
        self.arena: torch.Tensor = device.allocate_arena(config.vram_pages * config.page_bytes)

    def make_room(self, wanted: Sequence[Entry], seq: int, entries: Iterable[Entry]) -> list[Entry] | None:
        """Makes room for all of `wanted` (one tenant's), for the sake of lease `seq`: who was evicted, or None.

        All or nothing: a lease never holds half of its pages while it waits.
        """
        by_key = {e.key: e for e in entries if _evictable(e, seq)}
        candidates = [Candidate(e.key, e.pages, e.last_used) for e in by_key.values()]
        tenant, pages = wanted[0].key.tenant, sum(e.pages for e in wanted)

        def room(victims: Sequence[Candidate]) -> bool:
            return self.slots.free + len(victims) >= len(wanted)

        victims = plan_evictions(self._policy, self.budget, tenant, pages, candidates, room)
        return None if victims is None else [self._evicted(by_key[v.key]) for v in victims]

    def take(self, entry: Entry) -> Allotment:
        """Gives `entry` pages and a slot; `make_room` has said yes."""
        assert entry.prepared is not None
        assert entry.resident is None
        allotment = self._pool.take(entry.pages, entry.key.tenant)
        assert allotment is not None, "the budget and the pool disagree"
        self.budget.take(entry.key.tenant, entry.pages)
        slot, generation = self.slots.take()
        manifest, layout = entry.prepared.manifest, entry.prepared.layout
        entry.resident = Resident(entry.key, slot, generation, manifest, layout, allotment.pages)
        entry.copied, entry.copy_event, entry.joined, entry.readers = False, None, None, Readers()
        return allotment

    def evict(self, entry: Entry) -> None:
        """Frees pages and slot; whoever takes the pages waits for their last readers (I13)."""
        resident = entry.resident
        assert resident is not None
        assert entry.copied
        assert not entry.tickets
        self._pool.give_back(resident.pages, entry.readers.fence())
        self.budget.give_back(entry.key.tenant, entry.pages)
        self.slots.give_back(resident.slot)
        entry.resident, entry.copied, entry.copy_event, entry.joined = None, False, None, None

    def _evicted(self, entry: Entry) -> Entry:
        self.evict(entry)
        return entry


def _evictable(entry: Entry, seq: int) -> bool:
    """Resident, nobody has a claim on it (I12), no step reads it, no lease that waits as long as `seq` wants it."""
    return entry.copied and not entry.holders and not entry.tickets and not entry.spared_for(seq)
