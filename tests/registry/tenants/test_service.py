"""Tenants and policies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from adapterd.loader.errors import Code, Conflict, Failed, NotFound
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.registry.services import Services
from adapterd.registry.tenants.interfaces import TenantInfo, TenantPolicy
from adapterd.registry.tenants.models import TenantRow
from fakes.clock import FakeClock


def test_create_get_list(services: Services, clock: FakeClock) -> None:
    for name in ("b", "a", "c.d-e_f"):
        assert services.tenants.create(name, actor="op") == TenantInfo(name, clock())
    assert [tenant.name for tenant in services.tenants.list()] == ["a", "b", "c.d-e_f"]
    assert [tenant.name for tenant in services.tenants.list(after="a", limit=1)] == ["b"]
    assert services.tenants.get("a") == TenantInfo("a", clock())


@pytest.mark.parametrize("name", ["", "-operator", "A", "a/b", "..", "a" * 65, "ä"])
def test_names_outside_the_grammar(name: str, services: Services) -> None:
    with pytest.raises(Failed) as caught:
        services.tenants.create(name, actor="op")
    assert caught.value.code is Code.REF_INVALID
    with pytest.raises(NotFound):
        services.tenants.get(name)


def test_a_name_is_taken_once(services: Services) -> None:
    services.tenants.create("acme", actor="op")
    with pytest.raises(Conflict) as caught:
        services.tenants.create("acme", actor="op")
    assert caught.value.code is Code.ALREADY_EXISTS
    assert len(services.audit.list("acme")) == 1


def test_of_two_creators_one_wins(services: Services) -> None:
    def create() -> str:
        try:
            return services.tenants.create("acme", actor="op").name
        except Conflict as caught:
            return caught.code

    with ThreadPoolExecutor(4) as pool:
        results = sorted(done.result() for done in [pool.submit(create) for _ in range(4)])
    assert results[-1] == "acme"
    assert set(results[:-1]) <= {Code.ALREADY_EXISTS, Code.CONFLICT}
    assert len(services.audit.list("acme")) == 1


def test_policy_fails_closed_by_default(services: Services) -> None:
    services.tenants.create("acme", actor="op")
    assert services.tenants.policy("acme") == TenantPolicy(require_signature=True, limits=DEFAULT_LIMITS)


def test_policy_round_trip(services: Services) -> None:
    services.tenants.create("acme", actor="op")
    limits = replace(DEFAULT_LIMITS, max_rank=16, allowed_target_modules=("q_proj", "v_proj"))
    policy = TenantPolicy(False, frozenset({Code.ZERO_DELTA}), frozenset({Code.SCALE_SUSPECT}), limits)
    assert services.tenants.set_policy("acme", lambda _: policy, actor="op") == policy
    assert services.tenants.policy("acme") == policy
    assert services.tenants.policy("acme").policy_id == policy.policy_id != TenantPolicy().policy_id
    assert policy.limits_id != TenantPolicy().limits_id
    with services.db.read() as session:  # a policy says what it changes, and follows the defaults in the rest
        assert set(session.get_one(TenantRow, "acme").limits) == {"max_rank", "allowed_target_modules"}
    assert services.audit.list("acme")[-1].detail["policy_id"] == policy.policy_id


@pytest.mark.parametrize("code", [Code.HASH_MISMATCH, Code.SIGNATURE_INVALID, Code.NONFINITE, Code.UNKNOWN_MODULE])
def test_no_policy_allows_what_is_not_safe(code: Code, services: Services) -> None:
    services.tenants.create("acme", actor="op")
    with pytest.raises(Failed) as caught:
        services.tenants.set_policy("acme", lambda _: TenantPolicy(allow=frozenset({code})), actor="op")
    assert caught.value.code is Code.SETTINGS_INVALID
    assert services.tenants.policy("acme") == TenantPolicy()


def test_an_unknown_tenant_is_missing_everywhere(services: Services) -> None:
    def locked() -> None:
        with services.db.write() as session:
            services.tenants.lock(session, "nobody")

    attempts = [
        lambda: services.tenants.get("nobody"),
        lambda: services.tenants.policy("nobody"),
        lambda: services.tenants.set_policy("nobody", lambda _: TenantPolicy(), actor="op"),
        locked,
    ]
    for attempt in attempts:
        with pytest.raises(NotFound):
            attempt()
    assert services.audit.list("nobody") == ()
