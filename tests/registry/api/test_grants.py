"""A token gives only what it has."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.clock import FakeClock
from fakes.registry_world import ALL_SCOPES, World


def wanted(**over: Any) -> dict[str, Any]:
    return {"kind": "s", "scopes": ["adapters:read"], "expires_in_days": 1, "adapters": ["team-a.tone"], **over}


@pytest.mark.parametrize(
    ("over", "where"),
    [
        ({}, None),
        ({"adapters": ["team-a.*"]}, None),
        ({"adapters": ["team-a.x*y", "team-a.*.*"]}, None),
        ({"scopes": ["tokens:admin"]}, None),
        ({"scopes": ["adapters:upload"]}, "scopes"),
        ({"scopes": ["adapters:read", "keys:admin"]}, "scopes"),
        ({"scopes": ["operator"]}, "scopes"),
        ({"adapters": ["*"]}, "adapters"),
        ({"adapters": ["team-*"]}, "adapters"),
        ({"adapters": ["team-a.tone", "finance"]}, "adapters"),
        ({"expires_in_days": 2}, "expires_in_days"),
        ({"expires_in_days": 366}, "expires_in_days"),
    ],
)
def test_a_token_of_a_tenant(world: World, over: dict[str, Any], where: str | None) -> None:
    giver = world.client(world.token("acme", "tokens:admin", "adapters:read", adapters=("team-a.*",)))
    answer = giver.post(world.acme.url("/tokens"), json=wanted(**over))
    if where is None:
        assert answer.status_code == 201, answer.text
    else:
        assert (answer.status_code, answer.json()["code"]) == (422, "REQUEST_INVALID")
        assert answer.json()["where"] == where


def test_time_that_has_passed_is_not_given(world: World, clock: FakeClock) -> None:
    giver = world.client(world.token("acme", "tokens:admin", "adapters:read"))
    clock.advance(hours=1)
    answer = giver.post(world.acme.url("/tokens"), json=wanted())
    assert (answer.status_code, answer.json()["where"]) == (422, "expires_in_days")


def test_an_operator_gives_a_tenant_its_first_token(world: World) -> None:
    answer = world.operator.post(
        world.acme.url("/tokens"), json=wanted(scopes=ALL_SCOPES, adapters=["*"], expires_in_days=366)
    )
    assert answer.status_code == 201, answer.text


def test_a_token_for_all_tenants_without_operator_gives_what_it_has(world: World) -> None:
    _, text = world.context.services.tokens.issue(
        None, kind="s", scopes=["tokens:admin"], expires_in_days=1, actor="test"
    )
    giver = world.client(text)
    assert giver.post(world.acme.url("/tokens"), json=wanted(scopes=["tokens:admin"])).status_code == 201
    assert giver.post(world.acme.url("/tokens"), json=wanted()).json()["where"] == "scopes"
    assert giver.post("/v1/tokens", json=wanted(scopes=["tokens:admin"])).status_code == 404


def test_limits_are_the_operator_s(world: World) -> None:
    url = world.acme.url("/policy")
    before = world.acme.http.get(url).json()
    answer = world.acme.http.put(url, json={"limits": {"max_total_bytes": 1 << 50}})
    assert (answer.status_code, answer.json()["code"], answer.json()["where"]) == (422, "REQUEST_INVALID", "limits")
    assert world.acme.http.get(url).json() == before
    assert world.operator.put(url, json={"limits": {"max_rank": 8}}).status_code == 200
    kept = world.acme.http.put(url, json={"require_signature": False}).json()
    assert (kept["require_signature"], kept["limits"]["max_rank"]) == (False, 8)
    assert world.acme.http.put(url, json=kept).status_code == 200, "the same limits are no change"
    assert world.acme.http.put(url, json={"limits": {}}).status_code == 422, "nor are the defaults the tenant's to take"
