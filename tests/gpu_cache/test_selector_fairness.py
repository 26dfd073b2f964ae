"""Nobody starves, whatever comes and in whatever order: single cases, and promises counted on random traces."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.step_budget import AdapterKey, Resource, StepLimits
from fakes.engine_loop import FakeEngine, FakeRequest
from fakes.small_engine import engine, row


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
