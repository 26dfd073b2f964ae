"""Budgets and evictions: what a tenant may take, and from whom (I10)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.gpu_cache import TenantBudget
from adapterd.gpu_cache.budgets import Budget
from adapterd.gpu_cache.eviction import Candidate, LeastRecentlyUsed, pages_wanted, plan_evictions
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.identity import VersionKey
from fakes.adapters import make_base

PIN = make_base().pin


def budget(total: int, **tenants: TenantBudget) -> Budget:
    return Budget("vram", total, 10, tenants, TenantBudget())


def candidate(tenant: str, name: str, pages: int, last_used: int) -> Candidate:
    return Candidate(VersionKey(tenant, PIN, name), pages, last_used)


def plan(budget: Budget, tenant: str, pages: int, *candidates: Candidate) -> list[str] | None:
    victims = plan_evictions(LeastRecentlyUsed(), tenant, [pages_wanted(budget, pages)], candidates)
    return None if victims is None else [v.key.digest for v in victims]


def test_free_pages_are_taken_before_anybody_is_evicted() -> None:
    assert plan(budget(4), "acme", 4, candidate("acme", "old", 2, 1)) == []


def test_the_longest_unused_goes_first_and_no_more_than_needed() -> None:
    b = budget(6)
    b.take("acme", 6)
    candidates = [candidate("acme", name, 2, tick) for name, tick in (("new", 9), ("old", 1), ("mid", 5))]
    assert plan(b, "acme", 3, *candidates) == ["old", "mid"]


def test_nobody_is_evicted_for_what_cannot_be_had() -> None:
    b = budget(6)
    b.take("acme", 6)
    assert plan(b, "acme", 3, candidate("acme", "small", 2, 1)) is None


def test_at_its_maximum_a_tenant_evicts_only_itself() -> None:
    b = budget(10, acme=TenantBudget(max_vram_bytes=40))
    b.take("acme", 4)
    b.take("blue", 6)
    mine, theirs = candidate("acme", "mine", 2, 9), candidate("blue", "theirs", 6, 1)
    assert plan(b, "acme", 2, mine, theirs) == ["mine"]
    assert plan(b, "acme", 2, theirs) is None


def test_a_guaranteed_share_cannot_be_evicted_by_others() -> None:
    b = budget(8, blue=TenantBudget(guaranteed_vram_bytes=40))
    b.take("blue", 6)
    b.take("acme", 2)
    first, second = candidate("blue", "first", 2, 1), candidate("blue", "second", 2, 2)
    assert plan(b, "acme", 2, first, second) == ["first"]
    assert plan(b, "acme", 4, first, second) is None
    assert plan(b, "blue", 4, first, second) == ["first", "second"]


def test_an_adapter_across_the_edge_of_a_share_goes_last() -> None:
    b = budget(8, blue=TenantBudget(guaranteed_vram_bytes=40))
    b.take("blue", 6)
    large, small = candidate("blue", "large", 5, 1), candidate("blue", "small", 1, 2)
    assert plan(b, "acme", 3, large, small) == ["small"]
    assert plan(b, "acme", 4, large, small) == ["small", "large"]
    b.give_back("blue", 2)
    assert plan(b, "acme", 5, candidate("blue", "share", 4, 1)) is None


def test_free_pages_that_a_guarantee_needs_are_not_taken() -> None:
    b = budget(8, blue=TenantBudget(guaranteed_vram_bytes=40))
    assert plan(b, "acme", 4) == []
    assert plan(b, "acme", 5) is None
    assert plan(b, "blue", 8) == []
    assert b.ceiling("acme") == 4
    assert b.ceiling("blue") == 8


def test_guarantees_are_rounded_up_and_must_fit() -> None:
    assert budget(8, blue=TenantBudget(guaranteed_vram_bytes=41)).guaranteed("blue") == 5
    for tenants, default in (({"a": TenantBudget(guaranteed_vram_bytes=81)}, TenantBudget()),
                             ({}, TenantBudget(guaranteed_vram_bytes=10))):  # fmt: skip
        with pytest.raises(AdapterdError) as refused:
            Budget("vram", 8, 10, tenants, default)
        assert refused.value.code is Code.SETTINGS_INVALID


NAMES = ["acme", "blue", "core"]


@given(
    guaranteed=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    events=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 6)), max_size=40),
)
def test_a_guarantee_can_always_be_had(guaranteed: list[int], events: list[tuple[str, int]]) -> None:
    """Whoever took what before: up to its share, a tenant needs to evict nobody else's."""
    shares = {n: TenantBudget(guaranteed_vram_bytes=10 * g) for n, g in zip(NAMES, guaranteed, strict=True)}
    b = Budget("vram", 20, 10, shares, TenantBudget())
    held: list[Candidate] = []
    for tick, (tenant, pages) in enumerate(events):
        victims = plan_evictions(LeastRecentlyUsed(), tenant, [pages_wanted(b, pages)], held)
        if victims is None:
            assert pages > b.ceiling(tenant)
            continue
        for victim in victims:
            held.remove(victim)
            b.give_back(victim.key.tenant, victim.pages)
        b.take(tenant, pages)
        held.append(candidate(tenant, str(tick), pages, tick))
        for name in NAMES:
            missing = b.guaranteed(name) - b.used.get(name, 0)
            assert missing <= 0 or b.may_take(name, missing, b.used)
