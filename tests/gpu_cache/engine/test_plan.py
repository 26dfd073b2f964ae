from __future__ import annotations

from collections.abc import Sequence

import pytest

from adapterd.gpu_cache.engine.plan import BatchPlan, LeaseLike, Planner, split_rows
from adapterd.loader.errors import Code, Failed
from fakes.static_cache import StaticCache, StaticLease
from fakes.toy_models import LINEARS, toy_spec


def build_plan(rows: Sequence[tuple[LeaseLike | None, int]]) -> BatchPlan:
    return Planner().plan(*split_rows(rows))


@pytest.fixture
def cache() -> StaticCache:
    return StaticCache(toy_spec())


def test_segments_cover_the_rows_in_order_and_neighbours_merge(cache: StaticCache) -> None:
    one, two = (cache.add({LINEARS[0]: 4}, seed=s) for s in (1, 2))
    first, again, other = cache.lease(one), cache.lease(one), cache.lease(two)
    plan = build_plan([(first, 2), (again, 3), (None, 1), (None, 4), (other, 1), (first, 1)])
    assert [(s.start, s.rows, len(s.components)) for s in plan.segments] == [
        (0, 5, 1), (5, 5, 0), (10, 1, 1), (11, 1, 1),
    ]  # fmt: skip
    assert plan.rows == 12
    assert [r.slot for r in plan.residents()] == [one.resident.slot, two.resident.slot]


def test_weights_and_generations_keep_segments_apart(cache: StaticCache) -> None:
    one, two = (cache.add({LINEARS[0]: 4}, seed=s) for s in (1, 2))
    whole, half, both = cache.lease(one), cache.lease((one, 0.5)), cache.lease(one, two)
    cache.evict(one)
    successor = cache.add({LINEARS[0]: 4}, seed=3)
    assert successor.resident.slot == one.resident.slot
    plan = build_plan([(whole, 1), (half, 1), (both, 1), (cache.lease(successor), 1)])
    assert [s.rows for s in plan.segments] == [1, 1, 1, 1]


def test_an_empty_composition_is_the_base(cache: StaticCache) -> None:
    plan = build_plan([(cache.lease(), 2), (None, 3)])
    assert [(s.rows, s.components) for s in plan.segments] == [(5, ())]


@pytest.mark.parametrize("rows", [0, -1, 1.0, True, "3", None])
def test_an_entry_needs_rows(rows: object) -> None:
    with pytest.raises(Failed) as caught:
        split_rows([(None, 1), (None, rows)])  # type: ignore[list-item]
    assert caught.value.code is Code.REQUEST_INVALID
    assert caught.value.problem.where == "step[1].rows"


def test_a_step_needs_an_entry() -> None:
    with pytest.raises(Failed) as caught:
        split_rows([])
    assert caught.value.code is Code.REQUEST_INVALID


def test_a_standing_batch_is_the_same_plan_and_a_changed_one_says_where() -> None:
    cache, planner = StaticCache(toy_spec()), Planner()
    one, two, three = (StaticLease(((cache.add({LINEARS[0]: 4}, seed=s).resident, 1.0),)) for s in range(3))
    first = planner.plan([one, None, two], (1, 1, 1))
    assert planner.plan((one, None, two), (1, 1, 1)) is first
    again = StaticLease((*one.composition,))
    assert again.composition is not one.composition
    assert planner.plan((again, None, two), (1, 1, 1)) is first, "another lease on the same"
    assert first.follows is None
    second = planner.plan([one, three, two], (1, 1, 1))
    assert (second.follows, list(second.changed)) == (first.mark, [1])
    assert second.compositions == (one.composition, three.composition, two.composition)
    longer = planner.plan([one, three, two], (1, 2, 1))
    assert (longer.follows, list(longer.changed), longer.rows) == (second.mark, [], 4)
    assert planner.plan([one, three], (1, 2)).follows is None


def test_what_is_no_tuple_is_taken_anew() -> None:
    """A list may be changed where it is: its address says nothing."""
    cache, planner = StaticCache(toy_spec()), Planner()
    residents = [cache.add({LINEARS[0]: 4}, seed=s).resident for s in range(2)]
    lease = StaticLease([(residents[0], 1.0)])
    first = planner.plan([None, lease], (1, 1))
    lease.composition[0] = (residents[1], 1.0)
    second = planner.plan([None, lease], (1, 1))
    assert first.compositions == ((), ((residents[0], 1.0),))
    assert second.compositions == ((), ((residents[1], 1.0),))
    assert list(second.changed) == [1]
