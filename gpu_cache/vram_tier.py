"""The arena: pages, slots and budgets of what is in VRAM. Touches no bytes; `copies` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from adapterd.gpu_cache.budgets import Budget, slot_shares
from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.device import Device
from adapterd.gpu_cache.eviction import Candidate, GuardedPolicy, Policy, pages_wanted, plan_evictions, slots_wanted
from adapterd.gpu_cache.fences import OPEN, Fence, Readers
from adapterd.gpu_cache.pages import Allotment, PagePool
from adapterd.gpu_cache.records import Cause, Entry, LeaseRecord
from adapterd.gpu_cache.slots import Resident, SlotTable

if TYPE_CHECKING:
    import torch


class VramTier:
    """Who has which pages and slots. Methods need the cache's lock."""

    def __init__(self, device: Device, config: CacheConfig, policy: Policy) -> None:
        self.policy = GuardedPolicy.of(policy)
        self.budget = Budget("vram", config.vram_pages, config.page_bytes, config.tenants, config.default_budget)
        self.slots = SlotTable(config.max_residents)
        self.slot_shares = slot_shares(config.max_residents, self.budget)
        self.evictions: Counter[Cause] = Counter()
        self.changes = 0  # of the place of any adapter
        self._claimed: dict[int, Entry] = {}
        self._pool = PagePool(config.vram_pages)
        self.arena: torch.Tensor = device.allocate_arena(config.vram_pages * config.page_bytes)

    @property
    def dead(self) -> list[Entry]:
        """Those that are found no more and still have their room."""
        return [entry for entry in self._claimed.values() if entry.dead]

    def make_room(self, record: LeaseRecord) -> list[Entry] | None:
        """Makes room for all that `record` misses: who was evicted for it, or None if it must wait.

        All or nothing: a lease never holds half of its pages while it waits.
        """
        missing, tenant = record.missing, record.tenant
        wants = (
            pages_wanted(self.budget, sum(entry.pages for entry in missing)),
            slots_wanted(self.slot_shares, len(missing)),
        )
        if all(want.shares.may_take(tenant, want.amount, want.shares.used) for want in wants):
            return []
        free = _evictable(self._claimed.values(), record)
        candidates = [Candidate(e.key, e.resident.layout.n_pages, e.last_used) for e in free if e.resident is not None]
        entries = dict(zip(map(id, candidates), free, strict=True))
        victims = plan_evictions(self.policy, tenant, wants, candidates)
        return None if victims is None else [self._evicted(entries[id(v)]) for v in victims]

    def claim(self, entry: Entry) -> None:
        """The room becomes `entry`'s, before its bytes are here; `make_room` has said yes.

        Pages are chosen with `take` only: what the pool knows about a page's last tenant stays true.
        """
        assert not entry.claimed
        self.budget.take(entry.key.tenant, entry.pages)
        self.slot_shares.take(entry.key.tenant, 1)
        self._claimed[id(entry)] = entry
        entry.claimed, entry.used = True, False
        self.changes += 1

    def unclaim(self, entry: Entry) -> None:
        """The bytes will not come."""
        assert entry.resident is None
        self._give_back(entry)

    def take(self, entry: Entry) -> Allotment:
        """Pages and a slot of the claimed room."""
        assert entry.claimed
        assert entry.resident is None
        assert entry.facts is not None
        allotment = self._pool.take(entry.pages, entry.key.tenant)
        assert allotment is not None, "the budget and the pool disagree"
        slot, generation = self.slots.take()
        manifest, layout = entry.facts.manifest, entry.facts.layout
        entry.resident = Resident(entry.key, slot, generation, manifest, layout, allotment.pages)
        return allotment

    def evict(self, entry: Entry, cause: Cause) -> None:
        """Frees pages and slot; whoever takes the pages waits for their last readers (I13)."""
        resident = entry.resident
        assert resident is not None
        assert entry.copied
        assert not entry.tickets
        self._pool.give_back(resident.pages, Fence.merged((entry.copied_by, entry.readers.fence())))
        self.slots.give_back(resident.slot)
        entry.resident, entry.copied, entry.copied_by = None, False, OPEN
        entry.joined, entry.readers = None, Readers()
        self._give_back(entry)
        self.evictions[cause] += 1

    def _give_back(self, entry: Entry) -> None:
        self.budget.give_back(entry.key.tenant, entry.pages)
        self.slot_shares.give_back(entry.key.tenant, 1)
        del self._claimed[id(entry)]
        entry.claimed = False
        self.changes += 1

    def _evicted(self, entry: Entry) -> Entry:
        self.evict(entry, Cause.ROOM)
        return entry


def _evictable(entries: Iterable[Entry], record: LeaseRecord) -> list[Entry]:
    """Resident, nobody has a claim on it (I12), no step reads it, no lease that goes before `record` wants it.

    A prefetch may take only what its own tenant had prefetched before, and what nobody has used since.
    """
    free = [e for e in entries if e.copied and not (e.dead or e.holders or e.tickets)]
    if record.purpose.brief:
        free = [e for e in free if not e.used and e.key.tenant == record.tenant]
    return [e for e in free if not (e.waiting and e.spared_for(record))]
