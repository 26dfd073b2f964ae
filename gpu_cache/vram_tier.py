"""The arena: pages, slots and budgets of what is in VRAM. Touches no bytes; `copies` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from adapterd.gpu_cache.budgets import Budget, slot_shares
from adapterd.gpu_cache.config import CacheConfig
from adapterd.gpu_cache.device import Device
from adapterd.gpu_cache.eviction import (
    Candidate,
    GuardedPolicy,
    Listed,
    Order,
    Policy,
    pages_wanted,
    plan_in_order,
    slots_wanted,
)
from adapterd.gpu_cache.fences import OPEN, Readers
from adapterd.gpu_cache.idle import Idle, IdleOrder, may_go
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
        self.idle = Idle()
        self._claimed: dict[int, Entry] = {}
        self._pool = PagePool(config.vram_pages)
        self.arena: torch.Tensor = device.allocate_arena(config.vram_pages * config.page_bytes)

    @property
    def dead(self) -> list[Entry]:
        """Those that are found no more and still have their room."""
        return [entry for entry in self._claimed.values() if entry.dead]

    def make_room(self, record: LeaseRecord, missing: Sequence[Entry]) -> list[Entry] | None:
        """Makes room for all that `record` is missing: who was evicted for it, or None if it must wait.

        All or nothing: a lease never holds half of its pages while it waits.
        """
        tenant, pages, slots = record.tenant, sum([entry.pages for entry in missing]), len(missing)
        if self.budget.guarantees or self.policy.own or len(self.budget.used) > 1:
            wants = pages_wanted(self.budget, pages), slots_wanted(self.slot_shares, slots)
            victims = plan_in_order(partial(self._order, record), tenant, wants)
        else:  # there is nobody's share to spare: whoever goes first will do
            lacking = pages - self.budget.room(tenant), slots - self.slot_shares.room(tenant)
            victims = self.idle.first(record, *lacking)
        return None if victims is None else [self._evicted(victim) for victim in victims]

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
        self.idle.remove(entry)
        self._pool.give_back(resident.pages, entry.readers.fence(behind=entry.copied_by))
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

    def _order(self, record: LeaseRecord) -> Order[Entry]:
        """Who may go for its sake: as it is kept, or all of them as a policy of somebody's own says."""
        if not self.policy.own:
            return IdleOrder(self.idle, record)
        free = [entry for entry in self._claimed.values() if may_go(entry, record)]
        candidates = [Candidate(entry.key, entry.pages, entry.last_used) for entry in free]
        entries = dict(zip(map(id, candidates), free, strict=True))
        return Listed([entries[id(candidate)] for candidate in self.policy.order(candidates)])

    def _evicted(self, entry: Entry) -> Entry:
        self.evict(entry, Cause.ROOM)
        return entry
