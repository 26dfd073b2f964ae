"""Who runs next: in turn, resident first, and nobody starves. `fakes.engine_loop` does and checks what is decided."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.selector import Selector
from adapterd.gpu_cache.step_budget import AdapterKey, Resource, StepBudget, StepLimits
from adapterd.gpu_cache.whereabouts import Whereabouts
from adapterd.loader.errors import Code
from fakes.engine_loop import FakeRequest
from fakes.small_engine import LIMITS, engine, row


def names(requests: tuple[FakeRequest, ...]) -> list[str]:
    return [request.id for request in requests]


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
