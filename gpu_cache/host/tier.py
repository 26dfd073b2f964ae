"""The slab's books: which pages hold which version, what each tenant has, and who has to go for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from adapterd.gpu_cache.budgets import Budget, TenantBudget
from adapterd.gpu_cache.eviction import Candidate, GuardedPolicy, Policy, pages_wanted, plan_evictions
from adapterd.gpu_cache.host.interface import HostUsage, Slab
from adapterd.gpu_cache.host.pages import SlabPages
from adapterd.gpu_cache.host.records import HostEntry
from adapterd.loader.identity import VersionKey
from adapterd.loader.image import Memory


@dataclass(frozen=True, slots=True, eq=False)
class PlainSlab:
    """Slab over memory of this process. `memory` is one writable stretch of bytes."""

    memory: memoryview
    page_bytes: int


class HostTier:
    """Pages of the slab and whose they are. Methods need the host's lock, but for `memory`."""

    def __init__(self, slab: Slab, tenants: Mapping[str, TenantBudget], default: TenantBudget, policy: Policy) -> None:
        """Raises Failed (SETTINGS_INVALID) when the guarantees exceed the slab."""
        self.slab, self._policy = slab, GuardedPolicy.of(policy)
        self._memory = memoryview(slab.memory).cast("B")
        count = len(self._memory) // slab.page_bytes
        self.budget = Budget("host", count, slab.page_bytes, tenants, default)
        self._pages = SlabPages(count)
        self._entries: dict[int, HostEntry] = {}  # those with pages, forgotten ones, too
        self._images: Counter[VersionKey] = Counter()  # bytes of what is filled and not forgotten

    def make_room(self, tenant: str, pages: int, keep: Collection[HostEntry]) -> list[HostEntry] | None:
        """Makes room for `pages` of the tenant: who was dropped for that, none of `keep`; None if it must wait."""
        if self.budget.may_take(tenant, pages, self.budget.used):
            return []
        free = [e for e in self._entries.values() if e.filled and not e.holders and e not in keep]
        candidates = [Candidate(e.key, len(e.pages or ()), e.last_used) for e in free]
        entries = {id(candidate): entry for candidate, entry in zip(candidates, free, strict=True)}
        victims = plan_evictions(self._policy, tenant, [pages_wanted(self.budget, pages)], candidates)
        return None if victims is None else [self._dropped(entries[id(v)]) for v in victims]

    def take(self, entry: HostEntry) -> None:
        """Gives `entry` its pages; `make_room` has said yes."""
        pages = self._pages.take(entry.size)
        assert pages is not None, "the budget and the slab disagree"
        entry.pages = pages
        self._entries[id(entry)] = entry
        self.budget.take(entry.key.tenant, len(pages))

    def fill(self, entry: HostEntry) -> None:
        """The bytes are in, and hold."""
        entry.filled = True
        self._count(entry, 1)

    def forget(self, entry: HostEntry) -> None:
        """It is found no more; its pages stay until `drop`."""
        self._count(entry, -1)
        entry.forgotten = True

    def drop(self, entry: HostEntry) -> None:
        """Frees the pages. Nothing reads or writes them any more: no job, no copy in flight."""
        assert entry.pages is not None
        self._count(entry, -1)
        self._pages.give_back(entry.pages)
        self.budget.give_back(entry.key.tenant, len(entry.pages))
        entry.pages, entry.filled = None, False
        del self._entries[id(entry)]

    def usage(self) -> HostUsage:
        """Counts what is held though forgotten, but does not name it. Serving waits for who has the host's lock: so
        nothing is counted here."""
        size, images = self.slab.page_bytes, self._images.copy()
        return HostUsage({t: n * size for t, n in self.budget.used.items()}, self.budget.free * size, images)

    def memory(self, pages: Sequence[int]) -> Memory:
        """The bytes of `pages`. Needs no lock: they are the caller's own."""
        size = self.slab.page_bytes
        if pages[-1] - pages[0] + 1 == len(pages):
            return self._memory[pages[0] * size : (pages[-1] + 1) * size]
        return [self._memory[page * size : (page + 1) * size] for page in pages]

    def _count(self, entry: HostEntry, sign: int) -> None:
        """An entry's bytes come to what `usage` names, or go."""
        if entry.filled and not entry.forgotten:
            assert entry.pages is not None
            self._images[entry.key] += sign * len(entry.pages) * self.slab.page_bytes
            if not self._images[entry.key]:
                del self._images[entry.key]

    def _dropped(self, entry: HostEntry) -> HostEntry:
        self.drop(entry)
        return entry
