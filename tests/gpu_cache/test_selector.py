"""Who runs next: in turn, resident first, and nobody starves. `fakes.engine_loop` does and checks what is decided."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.selector import Selector
from adapterd.gpu_cache.step_budget import AdapterKey, Resource, StepBudget, StepLimits
from adapterd.gpu_cache.whereabouts import Whereabouts
from adapterd.loader.errors import Code
from fakes.engine_loop import FakeEngine, FakeRequest

LIMITS = StepLimits(kv_blocks=8, rows=16, adapter_bytes=40, load_slots=2, load_bytes=20, page_bytes=10)


def engine(patience: int = 3, load_steps: int = 2, limits: StepLimits = LIMITS, **sizes: int) -> FakeEngine:
    return FakeEngine(limits, {("acme", name): size for name, size in sizes.items()}, patience, load_steps)


def names(requests: tuple[FakeRequest, ...]) -> list[str]:
    return [request.id for request in requests]


def row(name: str, *adapters: str, **how: object) -> FakeRequest:
    return FakeRequest(name, adapters=adapters, **how)  # type: ignore[arg-type]


# One step


def test_resident_and_base_rows_run_while_the_others_load() -> None:
    loop = engine(a=10, b=10)
    loop.resident[("acme", "a")] = 0
    loop.waiting = [row("cold", "b"), row("warm", "a", arrived=1), row("base", arrived=2)]
    chosen = loop.step()
    assert names(chosen.run) == ["base", "warm"]
    assert chosen.loads == (("acme", "b"),)
    assert loop.selector.passes("cold") == 1
    assert names(loop.step().run) == []
    assert names(loop.step().run) == ["cold"]


def test_rows_with_the_same_adapter_stand_together_and_tenants_do_not_mix() -> None:
    loop = engine(a=10)
    loop.sizes["blue", "a"] = 10
    loop.resident = {("acme", "a"): 0, ("blue", "a"): 0}
    loop.waiting = [
        row("1", "a"), row("2"), FakeRequest("3", "blue", ("a",)), row("4", "a"), FakeRequest("5", "blue")
    ]  # fmt: skip
    assert [(r.tenant, r.adapters) for r in loop.step().run] == [
        ("acme", ()), ("blue", ()), ("acme", ("a",)), ("acme", ("a",)), ("blue", ("a",))
    ]  # fmt: skip


def test_loads_are_bounded_by_slots_and_by_bytes_in_flight() -> None:
    loop = engine(a=10, b=10, c=10)
    loop.waiting = [row("1", "a"), row("2", "b"), row("3", "c")]
    assert loop.step().loads == (("acme", "a"), ("acme", "b"))
    loop = engine(a=20, b=10)
    loop.waiting = [row("1", "a"), row("2", "b")]
    assert loop.step().loads == (("acme", "a"),)
    assert loop.budget.taken(Resource.LOAD_BYTES) == 20


def test_an_adapter_is_loaded_once_for_all_that_want_it() -> None:
    loop = engine(a=10)
    loop.waiting = [row("1", "a"), row("2", "a")]
    assert loop.step().loads == (("acme", "a"),)
    assert loop.step().loads == ()
    assert names(loop.step().run) == ["1", "2"]


def test_a_composition_starts_when_all_of_it_is_here() -> None:
    loop = engine(a=10, b=10, load_steps=1)
    loop.resident[("acme", "a")] = 0
    loop.waiting = [row("both", "a", "b")]
    chosen = loop.step()
    assert (chosen.loads, chosen.held) == ((("acme", "b"),), {("acme", "a"), ("acme", "b")})
    assert names(loop.step().run) == ["both"]


def test_look_ahead_takes_no_room_from_what_the_waiting_want_and_is_here() -> None:
    loop = engine(a=20, b=20, c=10)
    loop.resident = {("acme", "a"): 0, ("acme", "b"): 0}
    loop.waiting = [row("cold", "c"), row("1", "a", kv_blocks=8, arrived=1), row("2", "b", kv_blocks=8, arrived=2)]
    chosen = loop.step()
    assert (names(chosen.started), chosen.held, chosen.loads) == (["1"], set(loop.resident), ())


def test_a_load_that_failed_gives_its_slot_back_and_is_tried_again_if_still_wanted() -> None:
    loop = engine(a=10, load_steps=9)
    loop.waiting = [row("1", "a")]
    loop.step()
    loop.staging.clear()
    assert loop.step().loads == (("acme", "a"),)
    loop.staging.clear()
    loop.cancel("1")
    loop.step()
    assert loop.budget.taken(Resource.LOAD_SLOTS) == loop.budget.taken(Resource.ADAPTER_BYTES) == 0


def test_what_can_never_run_is_refused_and_nothing_is_loaded_for_it() -> None:
    loop = engine(a=20, b=20, c=20, big=21)
    loop.waiting = [
        row("kv", kv_blocks=9),
        row("rows", rows=17),
        row("sum", "a", "b", "c"),
        row("load", "big"),
        row("fine", "c", arrived=1),
    ]
    chosen = loop.step()
    assert {r.id: (p.code, p.where) for r, p in chosen.refused} == {
        name: (Code.BUDGET_EXCEEDED, name) for name in ("kv", "rows", "sum", "load")
    }
    assert chosen.loads == (("acme", "c"),)


def test_running_requests_share_a_step_that_is_too_small_for_all() -> None:
    budget = StepBudget(StepLimits(kv_blocks=3, rows=3, adapter_bytes=1, load_slots=1, load_bytes=1))
    selector = Selector[FakeRequest](budget)
    running = [row("a", rows=1), row("b", rows=1), row("c", rows=1)]
    assert len(selector.select(running, [], {}, tick=0).started) == 3
    greedy = [row("a", rows=2), row("b", rows=3), row("c", rows=1)]
    ran = [names(selector.select([], greedy, {}, tick=tick).run) for tick in range(1, 5)]
    assert ran == [["a", "c"], ["b"], ["a", "c"], ["b"]]


def test_misuse_is_an_error() -> None:
    selector = Selector[FakeRequest](StepBudget(LIMITS))
    selector.select([], [], {}, tick=3)
    with pytest.raises(ValueError, match="time goes forwards"):
        selector.select([], [], {}, tick=3)
    with pytest.raises(ValueError, match="did not start here"):
        selector.select([], [row("stranger")], {}, tick=4)


def test_a_running_request_can_grow_and_give_back_early() -> None:
    loop = engine()
    loop.waiting = [row("1", steps=5)]
    loop.step()
    held = loop.selector.reservation("1")
    assert held is not None
    held.give_back()
    assert loop.budget.taken(Resource.KV_BLOCKS) == 0
    loop.cancel("1")
    loop.step()
    assert loop.selector.reservation("1") is None


def test_closing_gives_everything_back() -> None:
    loop = engine(a=10)
    loop.waiting = [row("1", steps=5), row("2", "a")]
    loop.step()
    loop.selector.close()
    assert loop.budget.outstanding == 0


# Nobody starves


def test_a_stream_of_resident_requests_passes_a_cold_one_over_so_often_and_no_more() -> None:
    """VRAM holds one adapter, and there is always somebody who wants the one that is in it."""
    loop = engine(patience=5, hot=30, cold=20)
    loop.resident[("acme", "hot")] = 0
    loop.waiting = [row("cold", "cold")]
    for number in range(40):
        loop.waiting.append(row(f"hot-{number}", "hot", arrived=number + 1, steps=3))
        loop.step()
    # due after 5 steps; 3 until the last of the hot ones is done, 2 to load
    assert loop.started_at["cold"] <= 5 + 3 + 2 + 1


def test_a_stream_of_small_requests_passes_a_large_one_over_so_often_and_no_more() -> None:
    loop = engine(patience=5)
    loop.waiting = [row(f"first-{number}", kv_blocks=2, steps=2 + number) for number in range(4)]
    loop.step()
    loop.waiting = [row("large", kv_blocks=8, arrived=1)]
    for number in range(40):
        loop.waiting.append(row(f"small-{number}", kv_blocks=2, arrived=number + 2, steps=4))
        loop.step()
    assert loop.started_at["large"] <= 1 + 2 * 5 + 4


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    loop = engine(patience=4)
    loop.waiting = [row(f"flood-{number:04}", steps=4) for number in range(2000)]
    loop.step()
    for number in range(10):
        loop.waiting.append(FakeRequest(f"blue-{number}", "blue", arrived=loop.tick, steps=4))
        arrived = loop.tick
        while f"blue-{number}" not in loop.started_at:
            loop.step()
        assert loop.started_at[f"blue-{number}"] - arrived <= 4  # the end of what runs


def test_a_due_composition_keeps_its_parts_before_anybody_behind_it_keeps_anything() -> None:
    loop = engine(patience=0, a=20, b=20, c=20)
    loop.waiting = [row("first", kv_blocks=8, steps=3)]
    loop.step()
    loop.resident = {("acme", "a"): 0, ("acme", "c"): 0}
    loop.waiting = [row("both", "a", "b"), row("behind", "c", arrived=1)]
    chosen = loop.step()
    assert (chosen.loads, chosen.held) == ((("acme", "b"),), {("acme", "a"), ("acme", "b")})


def test_a_smaller_load_does_not_slip_past_a_due_one_that_is_short_of_bytes_in_flight() -> None:
    loop = engine(patience=0, load_steps=3, a=10, b=20, c=10)
    loop.waiting = [row("1", "a")]
    loop.step()
    loop.waiting += [row("2", "b", arrived=1), row("3", "c", arrived=2)]
    assert loop.step().loads == ()
    loop.step()
    assert loop.step().loads == (("acme", "b"),)


@st.composite
def traces(draw: st.DrawFn) -> tuple[dict[str, int], list[FakeRequest], int, int, StepLimits]:
    """Sizes, requests by arrival, patience, load steps, limits. Every request fits when it is alone."""
    sizes = draw(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 20), min_size=1))
    limits = StepLimits(
        kv_blocks=draw(st.integers(4, 8)),
        rows=draw(st.integers(8, 24)),
        adapter_bytes=draw(st.sampled_from([40, 60])),
        load_slots=draw(st.integers(1, 3)),
        load_bytes=draw(st.sampled_from([20, 40])),
        page_bytes=10,
    )
    requests = [
        FakeRequest(
            f"r{number:03}",
            tenant,
            tuple(sorted(adapters)),
            arrived=arrived,
            kv_blocks=kv,
            rows=rows,
            steps=steps,
        )
        for number, (tenant, adapters, arrived, kv, rows, steps) in enumerate(
            draw(
                st.lists(
                    st.tuples(
                        st.sampled_from(["acme", "acme", "blue"]),
                        st.sets(st.sampled_from(sorted(sizes)), max_size=2),
                        st.integers(0, 30),
                        st.integers(1, 4),
                        st.integers(1, 8),
                        st.integers(1, 6),
                    ),
                    min_size=1,
                    max_size=40,
                )
            )
        )
    ]
    return sizes, sorted(requests, key=lambda r: r.arrived), draw(st.integers(0, 6)), draw(st.integers(1, 3)), limits


def played(trace: tuple[dict[str, int], list[FakeRequest], int, int, StepLimits]) -> Iterator[FakeEngine]:
    """The engine after each step of the trace, until everything is done."""
    sizes, requests, patience, load_steps, limits = trace
    tenants = {request.tenant for request in requests}
    loop = FakeEngine(limits, {(t, name): size for t in tenants for name, size in sizes.items()}, patience, load_steps)
    coming = list(requests)
    longest = max(request.steps for request in requests) + 2 * (load_steps + 1)
    for _ in range(32 + longest * (len(requests) + patience + 1)):
        while coming and coming[0].arrived <= loop.tick:
            loop.waiting.append(coming.pop(0))
        loop.step()
        yield loop
        if not (coming or loop.waiting or loop.running or loop.staging):
            return
    raise AssertionError(f"{loop.waiting} starve")


@settings(max_examples=80, deadline=None)
@given(traces())
def test_every_request_is_served_and_everything_comes_back(
    trace: tuple[dict[str, int], list[FakeRequest], int, int, StepLimits],
) -> None:
    for loop in played(trace):
        last = loop
    last.drain(1)
    assert len(last.finished) == len(trace[1]) and last.refused == []
    assert all(last.budget.taken(resource) == 0 for resource in Resource)
    assert last.budget.outstanding == 2  # the step's rows and what is kept: both empty


@settings(max_examples=80, deadline=None)
@given(traces())
def test_nobody_is_passed_over_more_often_than_promised(
    trace: tuple[dict[str, int], list[FakeRequest], int, int, StepLimits],
) -> None:
    """`patience` times. Once due, by adapter rows only while its own adapter is not here; a base row by nobody.

    Counted here, from who started when. One tenant, so that turns go by arrival.
    """
    sizes, requests, patience, load_steps, limits = trace
    requests = [FakeRequest(r.id, "acme", r.adapters, r.arrived, r.kv_blocks, r.rows, r.steps) for r in requests]
    passed = dict.fromkeys((r.id for r in requests), 0)
    late: dict[str, int] = {}  # those passed over while due: the tick of the last time
    ahead: dict[str, int] = {}  # those that are due: how many were ahead of them then
    due_at: dict[str, int] = {}
    waiting: list[FakeRequest] = []
    here: set[AdapterKey] = set()
    for loop in played((sizes, requests, patience, load_steps, limits)):
        now = [r for r in requests if r.arrived < loop.tick and loop.started_at.get(r.id, loop.tick) >= loop.tick - 1]
        waiting = sorted(now, key=lambda r: (r.arrived, r.id))
        started = [r for r in waiting if loop.started_at.get(r.id) == loop.tick - 1]
        for place, request in enumerate(waiting):
            if request in started or not any(other in started for other in waiting[place + 1 :]):
                continue
            if passed[request.id] >= patience:
                assert request.adapters, "a base row waits for nobody's adapter"
                behind = [other for other in waiting[place + 1 :] if other in started]
                assert not request.keys <= here or not any(other.adapters for other in behind)
                late[request.id] = loop.tick - 1
            passed[request.id] += 1
            if passed[request.id] == patience:
                ahead[request.id], due_at[request.id] = place, loop.tick - 1
        here = set(loop.resident)
    longest = max(r.steps for r in requests)
    for name, at in late.items():
        most = max(1, len(next(r for r in requests if r.id == name).adapters)) * (load_steps + 1)
        began = due_at.get(name, next(r for r in requests if r.id == name).arrived)
        assert at - began <= (ahead.get(name, len(requests)) + 1) * (2 * longest + 2 * most)


@settings(max_examples=80, deadline=None)
@given(traces(), st.integers(0, 40))
def test_base_rows_never_wait_for_adapters(
    trace: tuple[dict[str, int], list[FakeRequest], int, int, StepLimits], at: int
) -> None:
    """With all that waits for an adapter taken away, the same base rows start."""
    for number, loop in enumerate(played(trace)):
        if number < at:
            continue
        waiting = list(loop.waiting)
        running = [FakeRequest(r.id, r.tenant, r.adapters, rows=1) for r in loop.running.values()]
        there = [r for r in waiting if all(loop.place(key) is Place.RESIDENT for key in r.keys)]
        with_them, without = copy.deepcopy(loop.selector), copy.deepcopy(loop.selector)
        one = with_them.select(waiting, running, loop.residency, tick=loop.tick)
        two = without.select(there, running, loop.residency, tick=loop.tick)
        base = [{r.id for r in chosen.started if not r.adapters} for chosen in (one, two)]
        assert base[0] >= base[1]
        return


@given(traces(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_same_calls_get_the_same_answers_whatever_the_order_of_the_lists(
    trace: tuple[dict[str, int], list[FakeRequest], int, int, StepLimits], dice: random.Random
) -> None:
    for loop in played(trace):
        waiting = list(loop.waiting)
        running = [FakeRequest(r.id, r.tenant, r.adapters, rows=1) for r in loop.running.values()]
        one = copy.deepcopy(loop.selector).select(waiting, running, loop.residency, tick=loop.tick)
        dice.shuffle(waiting)
        dice.shuffle(running)
        assert copy.deepcopy(loop.selector).select(waiting, running, loop.residency, tick=loop.tick) == one


# Work


class Counting(dict[AdapterKey, Whereabouts]):
    """A residency that counts how often it is looked at."""

    looks = 0

    def get(self, key: AdapterKey, default: Whereabouts | None = None) -> Whereabouts | None:  # type: ignore[override]
        self.looks += 1
        return super().get(key, default)


def compared(count: int, residency: Mapping[AdapterKey, Whereabouts]) -> int:
    """Comparisons of turns in one selection of `count` waiting requests."""
    made = 0

    class Name(str):
        def __lt__(self, other: str) -> bool:
            nonlocal made
            made += 1
            return super().__lt__(other)

    waiting = [
        FakeRequest(Name(f"r{n * 7919 % count:05}"), f"t{n % 50}", (f"a{n % 3000}",) if n % 4 else (), rows=1)
        for n in range(count)
    ]
    limits = StepLimits(kv_blocks=256, rows=2048, adapter_bytes=8000, load_slots=8, load_bytes=80, page_bytes=10)
    Selector[FakeRequest](StepBudget(limits)).select(waiting, [], residency, tick=0)
    return made


def test_ten_thousand_waiting_requests_are_bounded_work() -> None:
    keys = [(f"t{n % 50}", f"a{n % 3000}") for n in range(10_000)]
    residency = Counting({key: Whereabouts(Place.RESIDENT if i % 4 else Place.HOST, 10) for i, key in enumerate(keys)})
    made = compared(10_000, residency)
    assert 0 < made <= 10_000 * 14  # log2
    assert residency.looks <= 4 * 10_000


# The page


def test_the_loop_in_the_documentation_serves_everybody() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/scheduling.md").read_text()
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)

    @dataclass(frozen=True)
    class Row:
        tenant: str
        digest: str
        tier: str
        bytes: int
        leases: int

    class Leases:
        """The engine's table of leases, over a cache that takes one step for a load."""

        def __init__(self) -> None:
            self.held, self.here = set[AdapterKey](), set[AdapterKey]()

        def residency(self) -> list[Row]:
            rows = [Row(*key, "resident" if key in self.here else "absent", 1 << 28, 1) for key in self.held]
            self.here = set(self.held)
            return rows

        def hold(self, key: AdapterKey) -> None:
            assert key not in self.held
            self.held.add(key)

        def hold_only(self, keys: frozenset[AdapterKey]) -> None:
            assert keys <= self.held
            self.held = set(keys)

    @dataclass(eq=False)
    class Served:
        id: str
        adapters: tuple[str, ...]
        kv_blocks: int = 64
        tenant: str = "acme"
        arrived: int = 0
        rows: int = 30
        left: int = 5
        failure: object = None

        @property
        def keys(self) -> set[AdapterKey]:
            return {(self.tenant, digest) for digest in self.adapters}

        @property
        def done(self) -> bool:
            return not self.left

        def forward(self) -> None:
            self.rows, self.left = 1, self.left - 1

        def fail(self, problem: object) -> None:
            self.failure = problem

    requests = [Served(f"r{n}", (f"a{n % 40}",) if n % 3 else ()) for n in range(120)]
    huge = Served("huge", (), kv_blocks=9000)
    cache, waiting, running, tick = Leases(), [*requests, huge], list[Served](), 0
    while waiting or running:
        names["one_step"](cache, waiting, running, tick)
        tick += 1
        assert tick < 200
    assert all(request.done and request.failure is None for request in requests)
    assert huge.failure is not None
    names["one_step"](cache, [], [], tick)
    assert not any(names["budget"].taken(resource) for resource in Resource)
