"""A model of the page pool, driven by Hypothesis. It needs no device, so every machine runs the same."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adapterd.gpu_cache.fences import OPEN, Fence
from adapterd.gpu_cache.pages import Allotment, PagePool

TENANTS = st.sampled_from(["acme", "blue", "core"])


class Mark:
    """An event that nobody ever asks."""

    def done(self) -> bool:
        return False


class PagePoolMachine(RuleBasedStateMachine):
    """Against a model: a set of used pages, and for each page the last fence and the last tenant."""

    @initialize(count=st.integers(0, 33))
    def open(self, count: int) -> None:
        self.count = count
        self.pool = PagePool(count)
        self.held: list[tuple[Allotment, str]] = []
        self.fences: dict[int, Fence] = {}
        self.tenants: dict[int, str] = {}

    def used(self) -> list[int]:
        return [page for allotment, _ in self.held for page in allotment.pages]

    @rule(wanted=st.integers(1, 12), tenant=TENANTS)
    def take(self, wanted: int, tenant: str) -> None:
        free = self.count - len(self.used())
        before = set(self.used())
        allotment = self.pool.take(wanted, tenant)
        if wanted > free:
            assert allotment is None
            return
        assert allotment is not None, "enough pages are free, and still it failed (I15)"
        pages = allotment.pages
        assert len(set(pages)) == len(pages) == wanted
        assert not before & set(pages)
        assert set(pages) <= set(range(self.count))
        wanted_marks = {id(e) for page in pages for e in self.fences.get(page, OPEN).events}
        assert {id(e) for e in allotment.fence.events} == wanted_marks
        assert set(allotment.scrub) == {p for p in pages if self.tenants.get(p, tenant) != tenant}
        self.fences.update(dict.fromkeys(pages, OPEN))
        self.tenants.update(dict.fromkeys(pages, tenant))
        self.held.append((allotment, tenant))

    @rule(data=st.data(), marks=st.integers(0, 2))
    def give_back(self, data: st.DataObject, marks: int) -> None:
        if not self.held:
            return
        index = data.draw(st.integers(0, len(self.held) - 1))
        allotment, _ = self.held.pop(index)
        fence = Fence(tuple(Mark() for _ in range(marks)))
        self.pool.give_back(allotment.pages, fence)
        self.fences.update(dict.fromkeys(allotment.pages, fence))

    @rule(tenant=TENANTS)
    def pairs_are_used_while_there_are_any(self, tenant: str) -> None:
        """An even number of pages comes in aligned pairs, as far as whole pairs are free."""
        used = set(self.used())
        whole = sum(1 for p in range(0, self.count - 1, 2) if not {p, p + 1} & used)
        wanted = 2 * min(whole, 3)
        if not wanted:
            return
        allotment = self.pool.take(wanted, tenant)
        assert allotment is not None
        pages = allotment.pages
        assert all(pages[i] % 2 == 0 and pages[i + 1] == pages[i] + 1 for i in range(0, wanted, 2))
        self.fences.update(dict.fromkeys(pages, OPEN))
        self.tenants.update(dict.fromkeys(pages, tenant))
        self.held.append((allotment, tenant))

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.free == self.count - len(self.used())
