"""What one tenant does is the same schedule whether or not another one churns (I10).

`blue` runs a trace: acquires, releases, steps, one of each a tick. `acme` churns beside it through adapters that
do not fit into its own share together, as fast as it can. Both have a guaranteed share of the arena and of the
slab, and want no more. Three things are said of blue's schedule, in blue's own terms:

* What it finds, copies and evicts, in which order, is the same to the entry, however little the link carries.
* While the link carries what both want, every lease is ready in the same tick, and every eviction, too.
* While it does not, the link is shared page by page: a lease takes about twice as long as alone, whatever acme has
  queued.

A tick: what both ask for, all loader jobs, a step that reads blue's ready leases, the end of the step before it,
behind which copies are issued, and all that the device has to do. So a step is always in flight, as in decoding.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from adapterd.gpu_cache import Lease, TenantBudget
from fakes.cache_world import World, pages
from machines.books import resident_keys

BLUE, ACME = 6, 5
"""Pages that each is guaranteed, and its maximum."""
SIZES = {f"blue/b{i}": 1 + i % 4 for i in range(6)} | {f"acme/a{i}": 1 + i % 5 for i in range(8)}
BUDGETS = {
    tenant: TenantBudget(
        guaranteed_vram_bytes=pages(share), max_vram_bytes=pages(share),
        guaranteed_host_bytes=pages(2 * share), max_host_bytes=pages(2 * share), max_loads=1,
    )
    for tenant, share in (("blue", BLUE), ("acme", ACME))
}  # fmt: skip
ENOUGH = BLUE + ACME
"""Pages a step that carry all that both can want in one tick."""

Trace = list[tuple[int, int]]
"""Tick by tick: which adapter blue acquires (−1: none), and how many leases it keeps."""
TRACES = st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 2)), min_size=6, max_size=30)
FEW = settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
CHURN = st.lists(st.integers(0, 7), min_size=1, max_size=6)


@dataclass
class Schedule:
    """What happened to blue.

    Attributes:
        asked, ready: the tick of each lease's acquire, and of its readiness.
        evicted: tick, and which adapter.
        order: the same without ticks, and what was found where.
        ticks: so many have passed.
    """

    asked: dict[int, int] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    evicted: list[tuple[int, str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    ticks: int = 0

    @property
    def taken(self) -> list[int]:
        """Ticks from the acquire to readiness, lease by lease."""
        return [tick - self.asked[number] for number, tick in sorted(self.ready.items())]


class Tenants:
    """Blue and, if `churn` is not empty, acme, in one world."""

    def __init__(self, world: World, churn: list[int]) -> None:
        self.world, self.churn = world, churn
        self.names = {world.loader.publish(name, size).digest: name for name, size in SIZES.items()}
        self.acme: deque[Lease] = deque()
        self.held: deque[Lease] = deque()
        self.schedule = Schedule()
        self.running = world.cache.begin_step([])
        self._resident: set[str] = set()
        self._watched: dict[int, Lease] = {}
        self._count = 0

    def acquire(self, index: int) -> int:
        lease = self.world.acquire(f"blue/b{index}")
        self._count += 1
        self._watched[self._count] = lease
        self.schedule.asked[self._count] = self.schedule.ticks
        self.held.append(lease)
        return self._count

    def keep(self, count: int) -> None:
        """Gives back blue's oldest ready leases, until `count` are left or none is ready."""
        for lease in [lease for lease in self.held if lease.ready][: max(0, len(self.held) - count)]:
            self.held.remove(lease)
            lease.release()

    def make_room(self, index: int) -> None:
        """Gives back blue's oldest leases until another adapter fits beside the rest."""
        while self.held and sum(self._size(lease) for lease in self.held) + SIZES[f"blue/b{index}"] > BLUE:
            self.held.popleft().release()

    def _size(self, lease: Lease) -> int:
        return sum(len(resident.pages) for resident, _ in lease.composition)

    def tick(self) -> None:
        self._churn()
        self.world.pool.run_all()
        ready = [lease for lease in self.held if lease.ready]
        step = self.world.cache.begin_step(ready)
        for lease in ready:
            for resident, _ in lease.composition:
                self.world.launch_check(resident)
        self.running.end()
        self.running = step
        while self.world.device.run(100):
            pass
        self.world.pump()
        self.schedule.ticks += 1
        self._look()

    def _churn(self) -> None:
        """Acme always has all that it may have: what is ready goes at once, and something else is wanted."""
        for _ in range(len(self.acme)):
            lease = self.acme.popleft()
            if lease.ready:
                lease.release()
            else:
                self.acme.append(lease)
        for index in self.churn if len(self.acme) < 3 else ():
            self.acme.append(self.world.acquire(f"acme/a{index}"))

    def _look(self) -> None:
        schedule, now = self.schedule, self.schedule.ticks
        resident = {self.names[key.digest] for key in resident_keys(self.world.cache, "blue")}
        gone, come = sorted(self._resident - resident), sorted(resident - self._resident)
        schedule.evicted += [(now, name) for name in gone]
        schedule.order += [f"evicted {name}" for name in gone] + [f"copied {name}" for name in come]
        self._resident = resident
        for number, lease in list(self._watched.items()):
            assert not lease.failed, lease.problem
            if lease.ready:
                schedule.ready[number] = now
                schedule.order.append(f"ready {number}")
                del self._watched[number]

    def end(self) -> None:
        self.running.end()
        for lease in (*self.held, *self.acme):
            lease.release()


def run(trace: Trace, churn: list[int], *, pages_per_step: int, patient: bool = False) -> Schedule:
    """Blue's schedule. A patient blue waits for what it acquired before its trace goes on."""
    room = BLUE + ACME
    with World(vram=room, host=2 * room, tenants=BUDGETS, pages_per_step=pages_per_step) as world:
        tenants = Tenants(world, churn)
        for index, kept in trace:
            if patient and index >= 0:
                tenants.make_room(index)
            number = tenants.acquire(index) if index >= 0 else 0
            tenants.tick()
            while patient and number and number not in tenants.schedule.ready:
                assert tenants.schedule.ticks < 2000, "blue is starved"
                tenants.tick()
            tenants.keep(kept)
        while tenants.held:
            assert tenants.schedule.ticks < 2000, "blue is starved"
            tenants.tick()
            tenants.keep(0)
        tenants.tick()
        tenants.end()
        assert world.violations == []
        return tenants.schedule


@settings(FEW)
@given(trace=TRACES, churn=CHURN, pages_per_step=st.integers(1, ENOUGH))
def test_what_is_found_copied_and_evicted_is_the_same(trace: Trace, churn: list[int], pages_per_step: int) -> None:
    alone = run(trace, [], pages_per_step=pages_per_step, patient=True)
    beside = run(trace, churn, pages_per_step=pages_per_step, patient=True)
    assert beside.order == alone.order


@settings(FEW)
@given(trace=TRACES, churn=CHURN)
def test_while_the_link_carries_all_of_it_every_tick_is_the_same(trace: Trace, churn: list[int]) -> None:
    alone, beside = (run(trace, each, pages_per_step=ENOUGH) for each in ([], churn))
    assert beside.ready == alone.ready
    assert beside.evicted == alone.evicted


@settings(FEW)
@given(trace=TRACES, churn=CHURN, pages_per_step=st.integers(1, 4))
def test_on_a_narrow_link_a_lease_is_later_by_as_much_as_it_copies(
    trace: Trace, churn: list[int], pages_per_step: int
) -> None:
    """Blue is patient: it has one load at a time, of four pages at most. For each page one of acme's may go first."""
    alone = run(trace, [], pages_per_step=pages_per_step, patient=True)
    beside = run(trace, churn, pages_per_step=pages_per_step, patient=True)
    most = max(SIZES[name] for name in SIZES if name.startswith("blue/"))
    waits = -(-most // pages_per_step) + 1
    assert beside.ready.keys() == alone.ready.keys()
    for number, (here, there) in enumerate(zip(beside.taken, alone.taken, strict=True)):
        assert here <= there + waits, f"lease {number + 1} took {here} ticks, {there} without acme"


@pytest.mark.parametrize("backlog", [10, 100])
def test_a_backlog_of_another_tenant_delays_no_load_by_more_than_itself(backlog: int) -> None:
    """Acme's share is as large as its backlog: first in, first out would let blue wait for all of it."""
    tenants = {
        name: TenantBudget(guaranteed_vram_bytes=pages(share), max_vram_bytes=pages(share))
        for name, share in (("acme", backlog), ("blue", 4))
    }
    with World(vram=backlog + 4, host=2 * backlog + 8, tenants=tenants, pages_per_step=2) as world:
        for index in range(backlog):
            world.loader.publish(f"acme/a{index}", 1)
        world.loader.publish("blue/b", 4)
        running = world.cache.begin_step([])
        churn = [world.acquire(f"acme/a{index}") for index in range(backlog)]
        lease = world.acquire("blue/b")
        world.settle()
        steps = 0
        while not lease.ready and steps < backlog:
            steps += 1
            step = world.cache.begin_step([])
            running.end()
            running = step
            world.settle()
        running.end()
        assert steps == 4  # a page a step for each of both
        assert sum(each.ready for each in churn) <= steps + 1


def test_the_churn_does_churn() -> None:
    """Else the above would say nothing."""
    with World(vram=BLUE + ACME, host=2 * (BLUE + ACME), tenants=BUDGETS, pages_per_step=2) as world:
        tenants = Tenants(world, [0, 1, 2, 3, 4])
        for _ in range(60):
            tenants.tick()
        tenants.end()
        assert world.copied > 40
