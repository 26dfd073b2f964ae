"""Whose turn it is: fair between tenants, first come first served within one, and never reshuffled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.gpu_cache.turns import Turns
from fakes.engine_loop import FakeRequest


def requests(tenant: str, count: int, *, arrived: int = 0, cost: int = 1) -> list[FakeRequest]:
    return [FakeRequest(f"{tenant}-{n}", tenant, arrived=arrived, kv_blocks=cost) for n in range(count)]


def ids(ordered: list[FakeRequest]) -> list[str]:
    return [request.id for request in ordered]


def test_one_tenant_is_first_come_first_served_whatever_the_order_of_the_list() -> None:
    waiting = [FakeRequest("late", arrived=2), FakeRequest("b", arrived=1), FakeRequest("a", arrived=1)]
    assert ids(Turns(1).order(waiting)) == ids(Turns(1).order(waiting[::-1])) == ["a", "b", "late"]


def test_tenants_take_turns_by_cost() -> None:
    waiting = requests("acme", 4, cost=1) + requests("blue", 2, cost=2)
    assert ids(Turns(1).order(waiting)) == ["acme-0", "blue-0", "acme-1", "acme-2", "blue-1", "acme-3"]


def test_a_flood_does_not_put_itself_before_another_tenants_first() -> None:
    turns, flood = Turns(1), requests("acme", 1000)
    turns.order(flood)
    assert ids(turns.order([*flood, *requests("blue", 2, arrived=1)]))[:4] == ["acme-0", "blue-0", "acme-1", "blue-1"]


def test_who_was_served_while_alone_owes_nothing_when_the_queue_has_been_empty() -> None:
    turns, alone = Turns(1), requests("acme", 100)
    turns.leave(turns.order(alone), {r.id for r in alone}, {r.id for r in alone})
    again = [FakeRequest("again", "acme", arrived=1), FakeRequest("new", "blue", arrived=2)]
    assert ids(turns.order(again)) == ["again", "new"]


def test_who_was_idle_saves_up_nothing() -> None:
    turns, waiting = Turns(1), requests("acme", 10)
    for _ in range(9):  # one after the other starts
        ordered = turns.order(waiting)
        turns.leave(ordered, {ordered[0].id}, {ordered[0].id})
        waiting = waiting[1:]
    more = [*waiting, *requests("acme2", 3, arrived=9), *requests("blue", 3, arrived=9)]
    assert ids(turns.order(more))[:3] == ["acme-9", "acme2-0", "blue-0"]


def test_a_request_is_passed_over_when_one_behind_it_starts_and_due_when_that_was_often_enough() -> None:
    turns, waiting = Turns(2), requests("acme", 4)
    turns.leave(turns.order(waiting), {"acme-2"}, {"acme-2"})
    assert [turns.passes(f"acme-{n}") for n in range(4)] == [1, 1, 0, 0]
    waiting = [r for r in waiting if r.id != "acme-2"]
    turns.leave(
        turns.order(waiting), {"acme-1", "acme-3"}, {"acme-1"}
    )  # acme-3 is refused: nobody is passed over by it
    waiting = waiting[:1]
    assert ids(turns.order(waiting)) == ["acme-0"]
    assert turns.passes("acme-0") == 2 and turns.due(waiting[0])


def test_who_leaves_unserved_is_forgotten() -> None:
    turns = Turns(0)
    turns.order(requests("acme", 3))
    assert turns.order([]) == []
    assert turns._turns == {} and turns.passes("acme-0") == 0
    turns.order(requests("blue", 1))
    assert set(turns._ends) == {"blue"}


def test_patience_is_checked() -> None:
    with pytest.raises(ValueError, match="patience"):
        Turns(-1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["acme", "blue", "cyan"]), st.integers(1, 9), st.booleans()), min_size=1, max_size=60
    )
)
def test_the_order_of_two_never_changes_and_tenants_with_work_are_served_alike(
    events: list[tuple[str, int, bool]],
) -> None:
    """Each event brings a request and may serve the first in turn.

    For two tenants that both have work all the time, what they got differs by no more than the two largest requests.
    """
    turns, waiting, before = Turns(3), list[FakeRequest](), list[str]()
    got: dict[frozenset[str], dict[str, int]] = {}
    for number, (tenant, cost, serve) in enumerate(events):
        waiting.append(FakeRequest(f"r{number}", tenant, arrived=number, kv_blocks=cost))
        ordered = turns.order(waiting)
        kept = [name for name in ids(ordered) if name in before]
        assert kept == [name for name in before if name in kept]
        before = ids(ordered)
        if serve:
            first = ordered[0]
            working = frozenset(request.tenant for request in waiting)
            got = {pair: counts for pair, counts in got.items() if pair <= working}
            for other in working - {first.tenant}:
                counts = got.setdefault(frozenset({first.tenant, other}), {first.tenant: 0, other: 0})
                counts[first.tenant] += first.kv_blocks
                assert abs(counts[first.tenant] - counts[other]) <= 2 * 9
            turns.leave(ordered, {first.id}, {first.id})
            waiting = [request for request in waiting if request is not first]
