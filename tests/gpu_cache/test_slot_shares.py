"""Slots are shared as pages are: many small adapters of one tenant do not keep others out of memory (I10)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.gpu_cache import TenantBudget
from adapterd.gpu_cache.budgets import Budget, slot_shares
from adapterd.loader.errors import AdapterdError, Code
from fakes.cache_world import World, shares


def small(world: World, tenant: str, count: int) -> list[str]:
    return [world.loader.publish(f"{tenant}/a{index}").pinned for index in range(count)]


def test_small_adapters_of_one_tenant_held_all_slots_and_kept_out_another_one_s_share() -> None:
    with World(vram=16, host=32, max_residents=4, tenants=shares(blue=8)) as world:
        mine = [world.acquire(ref) for ref in small(world, "acme", 6)]
        world.loader.publish("blue/b", 2)
        world.settle()
        assert sum(lease.ready for lease in mine) == 2  # of four slots two are blue's: one, and half of the rest
        assert world.ready("blue/b").ready


def test_idle_adapters_within_a_share_of_pages_held_all_slots_for_ever() -> None:
    """Beyond its share of slots a tenant's adapter is not spared, even if its bytes are within its share of pages."""
    with World(vram=16, host=32, max_residents=4, tenants=shares(blue=8)) as world:
        for ref in small(world, "blue", 4):
            world.ready(ref).release()
        assert world.ready(world.loader.publish("acme/a").pinned).ready
        assert len([row for row in world.cache.residency() if row.tenant == "blue" and row.slot is not None]) == 3


def test_a_share_of_slots_survives_another_tenants_churn() -> None:
    with World(vram=16, host=64, max_residents=4, tenants=shares(blue=8)) as world:
        for ref in small(world, "blue", 2):
            world.ready(ref).release()
        for ref in small(world, "acme", 10):
            world.ready(ref).release()
        assert sum(row.tenant == "blue" and row.slot is not None for row in world.cache.residency()) == 2


def test_a_composition_of_more_adapters_than_slots_waited_for_ever() -> None:
    with World(vram=8, max_residents=2) as world:
        assert world.failure([(ref, 1.0) for ref in small(world, "acme", 3)]) is Code.BUDGET_EXCEEDED
    with World(vram=8, max_residents=3, tenants=shares(blue=1)) as world:
        lease = world.acquire([(ref, 1.0) for ref in small(world, "acme", 3)])
        world.settle()
        assert lease.problem is not None
        assert "needs 3 slots of 3; tenant acme can have 2" in lease.problem.message


def test_more_pins_than_slots_are_refused_and_do_not_wait() -> None:
    with World(vram=8, max_residents=2) as world:
        pins = [world.cache.pin(ref, tenant="acme") for ref in small(world, "acme", 3)]
        world.settle()
        assert [pin.problem.code for pin in pins if pin.problem is not None] == [Code.BUDGET_EXCEEDED]
        assert sum(pin.ready for pin in pins) == 2


def test_a_slot_for_each_guarantee_or_the_configuration_is_refused() -> None:
    with pytest.raises(AdapterdError) as refused:
        World(vram=8, max_residents=1, tenants=shares(acme=1, blue=1))
    assert refused.value.problem.where == "max_residents"


@given(
    slots=st.integers(1, 40),
    total=st.integers(1, 40),
    guarantees=st.lists(st.integers(0, 40), max_size=5),
)
def test_shares_of_slots_fit_whatever_the_guarantees_are(slots: int, total: int, guarantees: list[int]) -> None:
    budgets = {f"t{i}": TenantBudget(guaranteed_vram_bytes=10 * pages) for i, pages in enumerate(guarantees)}
    owners = sum(pages > 0 for pages in guarantees)
    if sum(guarantees) > total or owners > slots:
        return
    found = slot_shares(slots, Budget("vram", total, 10, budgets, TenantBudget()))
    assert sum(found.guaranteed(tenant) for tenant in budgets) <= slots
    assert all((found.guaranteed(f"t{i}") > 0) == (pages > 0) for i, pages in enumerate(guarantees))
    assert all(found.ceiling(f"t{i}") >= 1 for i, pages in enumerate(guarantees) if pages)
