"""Looks into the cache's books: the one place of the machines that knows how it keeps them."""

from __future__ import annotations

from collections import Counter

from adapterd.gpu_cache import AdapterCache, LeaseState, Place, Resident
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.records import Resolving
from adapterd.gpu_cache.records import Entry, LeaseRecord
from adapterd.gpu_cache.routes import Route
from adapterd.gpu_cache.vram_tier import VramTier
from adapterd.loader.identity import VersionKey


class Books:
    """What must hold at every moment in which nobody is inside the cache.

    What has room in the arena is asked of the tier itself: an entry of a base that is gone, or one that the
    device has lost, still has pages while it is found no more.
    """

    def __init__(self, cache: AdapterCache) -> None:
        self._cache = cache
        self._uses: dict[tuple[int, int], Resident] = {}
        self._generations = list(self._vram.slots._generations)

    @property
    def _vram(self) -> VramTier:
        return self._cache._vram

    @property
    def _roomed(self) -> list[Entry]:
        return list(self._vram._claimed.values())

    @property
    def lost(self) -> set[int]:
        """Pages that the device refused to fill or to zero: they are never used again."""
        found = self._cache._stager.entries
        gone = [e for e in self._roomed if found.get(e.key) is not e and not e.copied]
        return {page for e in gone if e.resident is not None for page in e.resident.pages}

    @property
    def lost_pages(self) -> int:
        return len(self.lost)

    @property
    def residents(self) -> list[Resident]:
        """All that has pages in the arena."""
        return [e.resident for e in self._roomed if e.resident is not None]

    def holds(self, record: LeaseRecord) -> bool:
        """Whether anything is still held for that lease, here or by the host."""
        entries = {*self._roomed, *self._cache._stager.entries.values()}
        return bool(record.fetch or record.images) or any(
            record in (*entry.holders.values(), *entry.waiting.values()) for entry in entries
        )

    def all_current(self, record: LeaseRecord) -> bool:
        """Whether all that a lease pins is where it says."""
        current = self._vram.slots.current
        whole = len(record.residents) == len(record.components or ())
        return whole and all(current(resident) for resident, _ in record.residents)

    def current(self, route: Route) -> str | None:
        """The version that the route serves. Nothing moves by the question."""
        with self._cache._lock:
            return route.snapshot().current

    def check(self) -> None:
        self._check_pages()
        self._check_pins()
        self._check_idle()
        self._check_requests()
        self._check_slots(self.residents)
        self._check_statistics()

    def _check_pages(self) -> None:
        """Every page has one owner or none, and each tenant's account is the sum of what it holds."""
        budget, pool = self._vram.budget, self._vram._pool
        owned = [page for resident in self.residents for page in resident.pages]
        assert len(set(owned)) == len(owned), "a page has two owners"
        used = {page for pages, *_ in pool._used.values() for page in pages}
        assert set(owned) == used, "a page is used by nobody, or not known to be used"
        assert pool.free + len(owned) == pool.count == budget.total, "pages are lost, or counted twice"
        held: Counter[str] = Counter()
        for entry in self._roomed:
            held[entry.key.tenant] += entry.pages
            assert entry.claimed
        assert +held == Counter(budget.used), "a budget is not the sum of what its tenant holds"
        for tenant in budget.used:
            assert budget.used[tenant] <= budget.maximum(tenant)
        owed = sum(max(0, share - budget.used.get(t, 0)) for t, share in budget._guaranteed.items())
        assert budget.free >= owed, "a guaranteed share could not be had"

    def _check_pins(self) -> None:
        for entry in {*self._roomed, *self._cache._stager.entries.values()}:
            assert entry.tickets >= 0
            assert not entry.holders or entry.claimed, "evicted though a lease has it"
            assert not entry.tickets or entry.resident is not None, "evicted though a step reads it"
            assert all(r.live for r in (*entry.holders.values(), *entry.waiting.values())), "a dead lease holds on"

    def _check_idle(self) -> None:
        """Whoever may go is found when room is needed, and nobody is listed who is not there."""
        listed = {id(entry) for line in self._vram.idle._lines.values() for entry in line}
        assert listed <= {id(entry) for entry in self._roomed}, "listed, and has no room"
        for entry in self._roomed:
            assert (entry.spot is not None) == (id(entry) in listed)
            if entry.copied and not (entry.holders or entry.dead):
                assert id(entry) in listed, "nobody holds it, and it would never go"

    def _check_requests(self) -> None:
        """The host verifies and holds nothing but for what somebody here waits for, or copies from."""
        records = [*self._cache._book._held.values()]
        entries = {*self._roomed, *self._cache._stager.entries.values(), *(e for r in records for e in r.entries)}
        asks = [ask for each in records for ask in (each.lookup, each.fetch)]
        asks += [ask for each in entries for ask in (each.delivery, *each.checks.values())]
        asks += [each.load.hold.fetch for each in entries if each.load is not None]
        numbers = {ask.number for ask in asks if ask is not None}
        host = self._cache._host
        assert isinstance(host, HostCache)
        for request in host._requests:
            if not isinstance(request, Resolving):  # routes look up, too
                assert request.number in numbers, f"nobody lets go of request {request.number}"

    def _check_slots(self, residents: list[Resident]) -> None:
        """Generations only grow; a slot's generation names one use of it, for ever."""
        now = self._vram.slots._generations
        assert all(a <= b for a, b in zip(self._generations, now, strict=True)), "a generation went back"
        self._generations = list(now)
        assert len({r.slot for r in residents}) == len(residents), "a slot has two owners"
        assert self._vram.slots.free + len(residents) == len(now), "slots are lost, or counted twice"
        for resident in residents:
            assert self._uses.setdefault((resident.slot, resident.generation), resident) is resident

    def _check_statistics(self) -> None:
        statistics, budget = self._cache.statistics(), self._vram.budget
        size = budget.page_bytes
        assert statistics.vram_bytes == {t: n * size for t, n in budget.used.items() if n}
        assert statistics.vram_free_bytes + sum(statistics.vram_bytes.values()) == budget.total * size
        places = Counter(e.place for e in self._cache._stager.entries.values() if e.claimed)
        assert {p: statistics.adapters[p] for p in (Place.STAGING, Place.RESIDENT)} == {
            p: places[p] for p in (Place.STAGING, Place.RESIDENT)
        }
        assert statistics.host_free_bytes >= 0
        states = Counter(r.state for r in self._cache._book._held.values())
        unreleased = {s: n for s, n in statistics.leases.items() if s is not LeaseState.RELEASED and n}
        assert unreleased == dict(states)


def resident_keys(cache: AdapterCache, tenant: str) -> set[VersionKey]:
    """What the tenant has in the arena, or on its way there."""
    entries = cache._stager.entries
    return {key for key, entry in entries.items() if key.tenant == tenant and entry.claimed}
