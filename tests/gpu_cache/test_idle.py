"""Who may go is known without looking at everybody: in what order, and how many are looked at."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.gpu_cache.budgets import Budget, TenantBudget, slot_shares
from adapterd.gpu_cache.eviction import (
    Candidate,
    LeastRecentlyUsed,
    pages_wanted,
    plan_evictions,
    plan_in_order,
    slots_wanted,
)
from adapterd.gpu_cache.host.interface import Facts
from adapterd.gpu_cache.idle import Idle, IdleOrder, may_go
from adapterd.gpu_cache.records import Entry, LeaseRecord, Purpose
from adapterd.loader.identity import VersionKey
from adapterd.loader.layout import Layout
from adapterd.loader.manifest import Manifest
from fakes.adapters import make_base
from fakes.cache_world import World, shares

PIN = make_base().pin
NAMES = ["acme", "blue", "core"]
SHARES = st.lists(st.integers(0, 6), min_size=3, max_size=3)


def resident(tenant: str, number: int, pages: int = 1, last_used: int = 0) -> Entry:
    facts = Facts(Manifest(PIN, (), ()), Layout(16, "F32", pages, ()))
    return Entry(VersionKey(tenant, PIN, f"{number}"), facts=facts, claimed=True, copied=True, last_used=last_used)


def lease(tenant: str, purpose: Purpose = Purpose.USE) -> LeaseRecord:
    return LeaseRecord(10**6, tenant, PIN, (), purpose=purpose)


def hold(entry: Entry) -> None:
    entry.holders[1] = lease(entry.key.tenant)


@given(st.data())
def test_a_walk_meets_those_that_nobody_holds_the_longest_unused_first(data: st.DataObject) -> None:
    idle, tick = Idle(), 100
    entries = [resident("acme", number, last_used=number) for number in range(6)]
    for what, index in data.draw(st.lists(st.tuples(st.sampled_from("hlurw"), st.integers(0, 5)))):
        entry, tick = entries[index], tick + 1
        if what == "h":
            hold(entry)
        elif what == "u":  # a step reads what is held, or was
            entry.last_used = tick
        elif what == "r":
            idle.remove(entry)
        elif what == "w":
            list(idle.walk("acme"))
        else:
            entry.holders.clear()
            idle.add(entry)
    there = [entry for entry in entries if entry.spot is not None and not entry.holders]
    for _ in range(2):
        assert list(idle.walk("acme")) == sorted(there, key=lambda entry: entry.last_used)
    assert len(idle) == len(there), "who was held again is listed still"
    assert bool(idle.tenants) == bool(there), "no name is kept of who has none"


@given(
    residents=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 5), st.booleans()), max_size=12),
    guaranteed=SHARES,
    most=SHARES,
    taker=st.sampled_from(NAMES),
    wanted=st.integers(1, 12),
    order=st.randoms(use_true_random=False),
)
def test_the_same_go_as_if_all_had_been_put_in_order(
    residents: list[tuple[str, int, bool]],
    guaranteed: list[int],
    most: list[int],
    taker: str,
    wanted: int,
    order: Random,
) -> None:
    tenants = {
        name: TenantBudget(guaranteed_vram_bytes=g, max_vram_bytes=max(g, 40 - 5 * m))
        for name, g, m in zip(NAMES, guaranteed, most, strict=True)
    }
    budget, idle, entries = Budget("vram", 40, 1, tenants, TenantBudget()), Idle(), []
    ticks = list(range(len(residents)))
    order.shuffle(ticks)
    for number, (tenant, pages, held) in enumerate(residents):
        if not budget.may_take(tenant, pages, budget.used):
            continue
        budget.take(tenant, pages)
        entry = resident(tenant, number, pages, ticks[number])
        idle.add(entry)
        if held:
            hold(entry)
        entries.append(entry)
    candidates = [Candidate(e.key, e.pages, e.last_used) for e in entries if not e.holders]
    wants = [pages_wanted(budget, wanted)]
    found = plan_in_order(partial(IdleOrder, idle, lease(taker)), taker, wants)
    expected = plan_evictions(LeastRecentlyUsed(), taker, wants, candidates)
    assert (found and [e.key for e in found]) == (expected and [c.key for c in expected])
    again = plan_in_order(partial(IdleOrder, idle, lease(taker)), taker, wants)
    assert again == found, "a plan moves nobody"


@given(
    residents=st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=12),
    most=st.integers(20, 60),
    pages=st.integers(1, 20),
    slots=st.integers(1, 4),
    taker=st.sampled_from(NAMES[:2]),
    order=st.randoms(use_true_random=False),
)
def test_of_one_tenants_alone_the_same_go_as_by_the_plan(
    residents: list[tuple[int, bool]], most: int, pages: int, slots: int, taker: str, order: Random
) -> None:
    budget = Budget("vram", 60, 1, {"acme": TenantBudget(max_vram_bytes=most)}, TenantBudget())
    slots_of, idle = slot_shares(13, budget), Idle()
    ticks = list(range(len(residents)))
    order.shuffle(ticks)
    for number, (size, held) in enumerate(residents):
        if not budget.may_take("acme", size, budget.used):
            continue
        budget.take("acme", size)
        slots_of.take("acme", 1)
        entry = resident("acme", number, size, ticks[number])
        idle.add(entry)
        if held:
            hold(entry)
    wants = pages_wanted(budget, pages), slots_wanted(slots_of, slots)
    found = idle.first(lease(taker), pages - budget.room(taker), slots - slots_of.room(taker))
    assert found == plan_in_order(partial(IdleOrder, idle, lease(taker)), taker, wants)


def test_a_name_is_kept_while_its_tenant_has_any() -> None:
    idle, entry = Idle(), resident("acme", 1)
    idle.add(entry)
    assert idle.tenants == ("acme",)
    idle.remove(entry)
    assert (idle.tenants, entry.spot) == ((), None)


def test_who_is_held_again_leaves_the_line_when_it_is_walked_along() -> None:
    idle, entries = Idle(), [resident("acme", number) for number in range(2)]
    for entry in entries:
        idle.add(entry)
    hold(entries[0])
    assert list(idle.walk("acme")) == entries[1:]
    assert (entries[0].spot, len(idle)) == (None, 1)


def test_of_several_tenants_the_longest_unused_goes_first_that_fits() -> None:
    idle = Idle()
    late, early, small = resident("acme", 1, 4, 7), resident("blue", 2, 4, 3), resident("blue", 3, 1, 5)
    for entry in (late, early, small):
        idle.add(entry)
    order = IdleOrder(idle, lease("core"))
    assert order.take(lambda _: True, lambda entry: entry.pages < 4) is small
    assert order.take(lambda _: True, lambda entry: entry.pages < 4) is None
    assert [order.take(lambda _: True, lambda _: True) for _ in range(3)] == [early, late, None]


def test_what_is_on_its_way_in_may_not_go() -> None:
    entry = resident("acme", 1)
    assert may_go(entry, lease("acme"))
    entry.copied = False
    assert not may_go(entry, lease("acme"))


def test_a_prefetch_is_offered_only_what_its_tenant_had_prefetched() -> None:
    idle = Idle()
    entries = [resident("acme", 1, last_used=1), resident("blue", 2, last_used=2), resident("acme", 3, last_used=3)]
    entries[0].used = True
    for entry in entries:
        idle.add(entry)
    order = IdleOrder(idle, lease("acme", Purpose.PREFETCH))
    assert order.take(lambda _: True, lambda _: True) is entries[2]
    assert order.take(lambda _: True, lambda _: True) is None


@pytest.mark.parametrize("tenants", [{}, shares(blue=1)])
@pytest.mark.parametrize("residents", [8, 64])
def test_room_is_found_by_looking_at_those_who_go_however_many_are_here(
    residents: int, tenants: dict[str, TenantBudget]
) -> None:
    kept = len(tenants)
    with World(vram=residents + kept, host=2 * residents + 4, max_residents=residents + kept, tenants=tenants) as world:
        names = [f"acme/a{number}" for number in range(residents)]
        for name in (*names, "acme/late", "acme/two"):
            world.loader.publish(name, 1 + (name == "acme/two"))
        leases = [world.ready(name) for name in names]
        for lease in leases[::2]:
            lease.release()
        idle = world.cache._vram.idle
        before = idle.looked
        world.ready("acme/late").release()
        assert idle.looked - before == 1
        world.ready("acme/two").release()
        assert idle.looked - before == 3
        assert all(lease.ready for lease in leases[1::2])


def test_the_share_of_another_tenant_is_not_walked_through() -> None:
    idle = Idle()
    budget = Budget("vram", 40, 1, {"blue": TenantBudget(guaranteed_vram_bytes=30)}, TenantBudget())
    for number in range(30):
        idle.add(resident("blue", number, last_used=number))
    for number in range(10):
        idle.add(resident("acme", 100 + number, last_used=100 + number))
    budget.take("blue", 30)
    budget.take("acme", 10)
    victims = plan_in_order(partial(IdleOrder, idle, lease("core")), "core", [pages_wanted(budget, 2)])
    assert victims is not None
    assert [victim.last_used for victim in victims] == [100, 101]
    assert idle.looked == 2


def test_a_lease_that_comes_and_goes_lists_nothing_anew() -> None:
    with World(vram=8) as world:
        versions = [world.loader.publish(name, 2) for name in ("acme/a", "acme/b")]
        for version in versions:
            world.ready(version.pinned).release()
        idle = world.cache._vram.idle
        count = idle._count
        for _ in range(5):
            world.ready(versions[0].pinned).release()
        assert (len(idle), idle._count) == (2, count)
        assert [entry.key.digest for entry in idle.walk("acme")] == [versions[1].digest, versions[0].digest]
