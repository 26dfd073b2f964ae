"""Hypothesis drives a cache over the simulated device: leases, compositions, steps, cancels, churn beyond capacity,
leaks, reloads, changes of trust, failures of the source and of the device, all that operators do (`operators`), and
closing in the middle of all that (`ending`).

After every rule the books are compared with what is held (`books`), the machine's own model with the leases, and
every row with the bytes that its kernel read (`rows`). At the end nothing is stuck, and all counts are back at the
start; or the cache was closed in the middle, and everybody was told.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from adapterd.gpu_cache import Lease, TenantBudget
from adapterd.loader.errors import AdapterdError, Code, reject
from fakes.adapters import Published, make_base
from fakes.cache_world import World, pages
from machines.books import Books
from machines.ending import VRAM, Ending, OpenStep
from machines.flaky import FlakyDevice
from machines.operators import NAMES, PRIORITIES, SIZES, Operators, User, code_of, index
from machines.rows import Rows

HOST, BLUE_SHARE = 10, 3
BUDGETS = {
    "blue": TenantBudget(guaranteed_vram_bytes=pages(BLUE_SHARE), guaranteed_host_bytes=pages(2)),
    "core": TenantBudget(max_vram_bytes=pages(5), max_host_bytes=pages(5)),
}
WEIGHTS = st.sampled_from([1.0, 0.5, -1.0, 0.0])
GAVE_UP = {
    Code.BUDGET_EXCEEDED, Code.CHUNK_MISMATCH, Code.SLOT_STALE, Code.KEY_REVOKED, Code.DEVICE_ERROR,
    Code.VERSION_REVOKED, Code.CACHE_DRAINING,
}  # fmt: skip
"""Why a lease may fail: nothing else goes wrong in this world."""


class CacheMachine(Operators, Ending):
    @initialize(seed=st.integers(0, 1 << 16), keep_host=st.booleans(), early=st.sampled_from([False, False, True]))
    def open(self, seed: int, keep_host: bool, early: bool) -> None:
        """With early marks the slab keeps all and no base is reloaded: its pages have no guard but the marks."""
        self.world = World(
            vram=VRAM,
            host=10 * HOST if early else HOST,
            seed=seed,
            defect=lambda inner: FlakyDevice(inner, early=early),  # type: ignore[arg-type, return-value]
            shuffle_jobs=True,
            keep_host=keep_host or early,
            tenants={} if early else BUDGETS,
            max_residents=6,
            pages_per_step=2,
        )
        self.early = early
        self.world.__enter__()
        self.cache, self.device = self.world.cache, self.world.device
        self.users: list[User] = []
        self.steps: list[OpenStep] = []
        self.published: list[Published] = []
        self.versions = {name: self.publish(name) for name in SIZES}
        self.books = Books(self.cache)
        self.rows = Rows(self.published, self.cache.arena, self.launch)
        self.dropped = 0
        self.begin_operations()

    def launch(self, kernel: object) -> None:
        self.device.launch(self.device.compute, kernel)

    def publish(self, name: str) -> Published:
        publisher = f"k{len(self.published) % 5}"
        self.published.append(self.world.loader.publish(name, SIZES[name], publisher=publisher))
        return self.published[-1]

    # Users

    def ask(self, wish: str | list[tuple[str, float]], priority: int = 0) -> Lease:
        tenant = (wish if isinstance(wish, str) else wish[0][0]).partition("/")[0]
        with self.device.serving():
            lease = self.cache.acquire(wish, tenant=tenant, priority=priority)
        assert not self.draining or code_of(lease) is Code.CACHE_DRAINING
        return lease

    @rule(name=NAMES, pinned=st.booleans(), priority=PRIORITIES)
    def acquire(self, name: str, pinned: bool, priority: int) -> None:
        version = self.versions[name]
        lease = self.ask(version.pinned if pinned else name, priority)
        self.users.append(User(lease, {name: 1.0}, {version.digest} if pinned else set()))

    @rule(
        name=NAMES,
        others=st.lists(st.tuples(st.integers(0, 3), WEIGHTS), min_size=1, max_size=3),
        priority=PRIORITIES,
    )
    def acquire_a_composition(self, name: str, others: list[tuple[int, float]], priority: int) -> None:
        tenant = name.partition("/")[0]
        wish = [(name, 1.0), *((f"{tenant}/a{index}", weight) for index, weight in others)]
        weights: Counter[str] = Counter()
        for each, weight in wish:
            weights[each] += weight  # type: ignore[assignment]
        self.users.append(User(self.ask(wish, priority), {n: w for n, w in weights.items() if w}, set()))

    @precondition(lambda self: self.users)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        lease = self.users.pop(data.draw(index(self.users))).lease
        lease.release()
        if twice:
            lease.release()
        assert lease.released

    @precondition(lambda self: self.users)
    @rule(data=st.data(), look=st.booleans())
    def drop(self, data: st.DataObject, look: bool) -> None:
        user = self.users.pop(data.draw(index(self.users)))
        before, live = self.cache.statistics().leaked_leases, user.lease.record.live
        del user
        self.dropped += 1
        if look:
            self.world.pump()
            assert self.cache.statistics().leaked_leases >= before + live

    # Steps

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Rows in any order, a lease any number of times, base rows between them."""
        step = self.begin(self.draw_leases(data))
        if step is not None:
            self.end(step)

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def begin_a_long_step(self, data: st.DataObject) -> None:
        """Its kernels are launched when it ends; until then its leases may go."""
        step = self.begin(self.draw_leases(data))
        if step is not None:
            self.steps.append(step)

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def end_a_long_step(self, data: st.DataObject) -> None:
        step = self.steps.pop(data.draw(index(self.steps)))
        self.end(step)

    def begin(self, leases: list[Lease | None]) -> OpenStep | None:
        """None if the device refuses to wait: then nothing is pinned."""
        in_flight = self.cache.statistics().steps_in_flight
        rows = self.rows.of(leases)
        try:
            with self.device.serving():
                return OpenStep(self.cache.begin_step(leases), rows)
        except AdapterdError as refused:
            assert refused.code is Code.DEVICE_ERROR
            assert self.cache.statistics().steps_in_flight == in_flight
            return None

    def end(self, step: OpenStep) -> None:
        self.rows.run(step.rows)
        with self.device.serving():
            step.ticket.end()
            step.ticket.end()

    def ready(self) -> list[Lease]:
        return [user.lease for user in self.users if user.lease.ready]

    def draw_leases(self, data: st.DataObject) -> list[Lease | None]:
        choices = [None, *self.ready()]
        return [choices[i] for i in data.draw(st.lists(st.integers(0, len(choices) - 1), max_size=5))]

    @rule(names=st.lists(NAMES, min_size=2, max_size=6), kept=st.integers(0, 5))
    def churn(self, names: list[str], kept: int) -> None:
        """One user after the other: more than fits. Kernels and copies run late; one of the leases is kept."""
        for turn, name in enumerate(names):
            lease = self.ask(name)
            for _ in range(12):
                if lease.ready or lease.failed:
                    break
                self.time_passes(2, 3)
            if lease.ready and (step := self.begin([lease])) is not None:
                self.end(step)
            if turn == kept:
                self.users.append(User(lease, {name: 1.0}, set()))
            else:
                lease.release()

    # The world

    @rule(loads=st.integers(0, 8), work=st.integers(0, 30))
    def time_passes(self, loads: int, work: int) -> None:
        for _ in range(loads):
            self.world.pool.run_one()
        self.world.pump()
        self.device.run(work)

    @rule()
    def everything_gets_done(self) -> None:
        """And a step reads all that is ready."""
        self.world.settle()
        if not self.steps:
            self.revoked_bytes_are_gone()
        step = self.begin(list(self.ready()))
        if step is not None:
            self.end(step)

    @rule(name=NAMES)
    def a_new_version(self, name: str) -> None:
        self.versions[name] = self.publish(name)

    @rule(what=st.sampled_from(["source", "source", "copies", "waits", "stream", "trust", "base"]), data=st.data())
    def something_happens(self, what: str, data: st.DataObject) -> None:
        match what:
            case "source":
                self.a_source_goes_bad_or_good(data.draw(NAMES), data.draw(st.sampled_from(["fill", "prepare"])))
            case "copies" if self.books.lost_pages == 0:  # few are lost: their pages are gone for good
                self.device.refusals, self.device.refuse_after = 1, data.draw(st.integers(0, 4))
            case "waits":
                self.device.refuse_waits = 1
            case "stream" if not self.steps:
                self.device.change_compute()
            case "trust":
                self.world.loader.trust_changes += 1
            case "base" if not self.early:
                self.reload_the_base()

    def a_source_goes_bad_or_good(self, name: str, what: str) -> None:
        failures, key = self.world.loader.failures, f"{what} {name}"
        if failures.pop(key, None) is None:
            code = Code.CHUNK_MISMATCH if what == "fill" else Code.KEY_REVOKED
            failures[key] = reject(code, name, "not what was admitted")

    def reload_the_base(self) -> None:
        base = make_base("b" * 40 if self.cache.base.revision[0] == "a" else "a" * 40)
        before = [resident for lease in self.ready() for resident, _ in lease.composition]
        reasons = {user: user.lease.problem for user in self.users if user.lease.failed}
        self.cache.rebind(base)
        assert not any(self.cache._vram.slots.current(resident) for resident in before)
        assert all(user.lease.problem is reason for user, reason in reasons.items())
        assert not self.ready(), "a lease of the old base is ready"
        self.world.loader.base = base
        self.versions = {name: self.publish(name) for name in SIZES}

    # What must hold

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "books"):
            self.books.check()
            assert self.cache.statistics().steps_in_flight == len(self.steps)

    @invariant()
    def every_lease_is_what_was_asked_for(self) -> None:
        for user in getattr(self, "users", ()):
            if user.lease.ready:
                self.check_composition(user)
            elif user.lease.problem is not None:
                assert user.lease.problem.code in GAVE_UP, user.lease.problem

    def check_composition(self, user: User) -> None:
        by_digest = {v.digest: f"{v.resolved.tenant}/{v.resolved.adapter}" for v in self.published}
        found = {by_digest[r.key.digest]: w for r, w in user.lease.composition}
        assert found == user.weights
        for resident, _ in user.lease.composition:
            assert resident.key.tenant == user.lease.tenant
            assert resident.key.base == self.cache.base.pin
            assert not user.versions or resident.key.digest in user.versions
            assert self.cache._vram.slots.current(resident)

    @invariant()
    def prefix_keys_are_equal_only_if_outputs_are(self) -> None:
        keys: dict[bytes, object] = {}
        for user in getattr(self, "users", ()):
            if user.lease.ready:
                outputs = user.lease.tenant, tuple((r.key.digest, w) for r, w in user.lease.composition)
                assert keys.setdefault(user.lease.prefix_key(), outputs) == outputs
        assert len(set(keys.values())) == len(keys)

    @invariant()
    def nothing_wrong_was_read(self) -> None:
        if hasattr(self, "rows"):
            assert self.rows.wrong == []
