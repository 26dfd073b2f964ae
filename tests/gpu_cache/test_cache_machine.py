"""Hypothesis drives a cache over the simulated device: leases, churn, cancels, leaks, failures, reloads.

What is checked after every rule: no page has two owners, no more is handed out than there is, guaranteed
shares can be had, ready leases name what is really there. And at the end: nothing is stuck, every kernel
has read the bytes of its own adapters, and all books are empty once all is released.
"""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adapterd.gpu_cache import Lease, LeaseState, TenantBudget
from adapterd.loader.errors import Code, reject
from fakes.adapters import make_base
from fakes.cache_world import World, pages

VRAM, HOST, BLUE_SHARE = 8, 10, 3
SIZES = {f"{tenant}/a{i}": 1 + (2 * i) % 5 for tenant in ("acme", "blue", "core") for i in range(4)}
NAMES = st.sampled_from(sorted(SIZES))
BUDGETS = {
    "blue": TenantBudget(guaranteed_vram_bytes=pages(BLUE_SHARE), guaranteed_host_bytes=pages(2)),
    "core": TenantBudget(max_vram_bytes=pages(5), max_host_bytes=pages(5)),
}
WEIGHTS = st.sampled_from([1.0, 0.5, -1.0, 0.0])
GAVE_UP = {Code.BUDGET_EXCEEDED, Code.CHUNK_MISMATCH, Code.SLOT_STALE}


class CacheMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 16), keep_host=st.booleans())
    def open(self, seed: int, keep_host: bool) -> None:
        self.world = World(
            vram=VRAM,
            host=HOST,
            seed=seed,
            shuffle_jobs=True,
            keep_host=keep_host,
            tenants=BUDGETS,
            max_residents=6,
            pages_per_step=2,
        )
        self.world.__enter__()
        self.cache = self.world.cache
        self.leases: list[Lease] = []
        self.steps: list[tuple[object, ...]] = []
        self.versions = {name: self.world.loader.publish(name, size) for name, size in SIZES.items()}

    # Users

    @rule(name=NAMES, pinned=st.booleans(), priority=st.sampled_from([0, 0, 1]))
    def acquire(self, name: str, pinned: bool, priority: int) -> None:
        wish = self.versions[name].pinned if pinned else name
        self.leases.append(self.world.acquire(wish, priority=priority))

    @rule(name=NAMES, others=st.lists(st.tuples(st.integers(0, 3), WEIGHTS), min_size=1, max_size=3))
    def acquire_a_composition(self, name: str, others: list[tuple[int, float]]) -> None:
        tenant = name.partition("/")[0]
        parts = [(f"{tenant}/a{index}", weight) for index, weight in others]
        self.leases.append(self.world.acquire([(name, 1.0), *parts]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), how=st.sampled_from(["release", "release", "drop"]))
    def let_go(self, data: st.DataObject, how: str) -> None:
        lease = self.leases.pop(data.draw(_index(self.leases)))
        if how == "release":
            lease.release()

    @precondition(lambda self: any(lease.ready for lease in self.leases))
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        ready = [lease for lease in self.leases if lease.ready]
        self.world.step(*(ready[i] for i in data.draw(st.lists(_index(ready), max_size=4))))

    @precondition(lambda self: any(lease.ready for lease in self.leases))
    @rule(data=st.data())
    def begin_a_long_step(self, data: st.DataObject) -> None:
        """Its kernels are launched when it ends; until then its leases may go."""
        ready = [lease for lease in self.leases if lease.ready]
        lease = ready[data.draw(_index(ready))]
        self.steps.append((self.cache.begin_step([lease]), lease.composition))

    @precondition(lambda self: self.steps)
    @rule()
    def end_a_long_step(self) -> None:
        ticket, composition = self.steps.pop(0)
        for resident, _ in composition:  # type: ignore[attr-defined]
            self.world.launch_check(resident)
        ticket.end()  # type: ignore[attr-defined]

    # The world

    @rule(count=st.integers(1, 6))
    def loader_works(self, count: int) -> None:
        for _ in range(count):
            self.world.pool.run_one()

    @rule(count=st.integers(1, 12))
    def device_works(self, count: int) -> None:
        self.world.device.run(count)

    @rule()
    def pump(self) -> None:
        self.cache.pump()

    @rule(name=NAMES, bad=st.booleans())
    def bytes_go_bad_or_good(self, name: str, bad: bool) -> None:
        failures = self.world.loader.failures
        failures.pop(f"fill {name}", None)
        if bad:
            failures[f"fill {name}"] = reject(Code.CHUNK_MISMATCH, name, "not what was admitted")

    @rule(name=NAMES)
    def a_new_version(self, name: str) -> None:
        self.versions[name] = self.world.loader.publish(name, SIZES[name])

    @rule()
    def reload_the_base(self) -> None:
        base = make_base("b" * 40 if self.cache.base.revision[0] == "a" else "a" * 40)
        self.cache.rebind(base)
        self.world.loader.base = base
        for name, size in SIZES.items():
            self.versions[name] = self.world.loader.publish(name, size)

    # What must hold

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        statistics = self.cache.statistics()
        assert statistics.vram_free_bytes + sum(statistics.vram_bytes.values()) == pages(VRAM)
        assert statistics.host_free_bytes + sum(statistics.host_bytes.values()) == pages(HOST)
        assert statistics.vram_bytes.get("core", 0) <= pages(5)
        assert statistics.vram_free_bytes >= pages(BLUE_SHARE) - statistics.vram_bytes.get("blue", 0)

    @invariant()
    def ready_leases_have_pages_of_their_own(self) -> None:
        if not hasattr(self, "cache"):
            return
        residents = {r for lease in self.leases if lease.ready for r, _ in lease.composition}
        owned = [page for resident in residents for page in resident.pages]
        assert len(set(owned)) == len(owned)
        assert len({r.slot for r in residents}) == len(residents)
        with self.cache.begin_step([lease for lease in self.leases if lease.ready]):
            pass

    @invariant()
    def nothing_wrong_was_read(self) -> None:
        if hasattr(self, "world"):
            assert self.world.violations == []

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        while self.steps:
            self.end_a_long_step()
        self.world.settle()
        self.everybody_is_served_in_the_end()
        self.leases.clear()
        gc.collect()
        self.cache.rebind(self.cache.base)
        self.world.settle()
        statistics = self.cache.statistics()
        assert statistics.vram_bytes == statistics.host_bytes == {}
        assert statistics.leases[LeaseState.WAITING] == statistics.steps_in_flight == 0
        self.world.__exit__(None, None, None)
        assert self.world.violations == []

    def everybody_is_served_in_the_end(self) -> None:
        """As others release what they hold, every waiting lease becomes ready or has a reason."""
        self.world.loader.failures.clear()
        while self.leases:
            oldest_first = sorted(self.leases, key=lambda lease: lease.record.seq)
            done = [lease for lease in oldest_first if lease.ready or lease.failed]
            assert done, f"stuck: {oldest_first}"
            for lease in done:
                assert lease.ready or (lease.problem is not None and lease.problem.code in GAVE_UP)
                self.leases.remove(lease)
                lease.release()
            self.world.settle()


def _index(leases: list[Lease]) -> st.SearchStrategy[int]:
    """Hypothesis keeps what strategies are made of: with leases in them, a dropped one would live on."""
    return st.integers(0, len(leases) - 1)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes; switch it on to debug
    suppress_health_check=[HealthCheck.too_slow],
)
