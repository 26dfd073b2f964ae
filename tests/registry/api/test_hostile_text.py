"""Texts that no database, or not every one, can take: the same answer from both, and never a 500."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from sqlalchemy import select

from adapterd.loader.errors import AdapterdError, Code
from adapterd.registry.tenants.models import TenantRow
from fakes.registry_world import Package, World

CURSORS: list[Any] = [
    "\0", "a\0b", "\ud800", "\x1b", True, 2**31, -1, 1.5, None, [], {}, ["a"], ["a", "\0"], ["\ud800", "b"],
]  # fmt: skip
LISTS = [
    "/v1/tenants/acme/adapters", "/v1/tenants/acme/adapters/finance/versions", "/v1/tenants/acme/tokens",
    "/v1/tenants/acme/keys", "/v1/tenants/acme/adapters/finance/aliases/prod/history", "/v1/base-models",
]  # fmt: skip


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_cursors(world: World, package: Package) -> None:
    world.acme.publish(package, alias="prod")
    for path in LISTS:
        for key in CURSORS:
            cursor = base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")
            answer = world.acme.http.get(path, params={"cursor": cursor})
            assert (answer.status_code, answer.json()["code"]) == (422, "REQUEST_INVALID"), (path, key)


def test_paths(world: World) -> None:
    for method, rest in (
        ("GET", "/adapters/a%00b"), ("GET", "/adapters/finance/versions/sha256:%00"), ("GET", "/uploads/%00"),
        ("GET", "/adapters/finance/aliases/%00"), ("DELETE", "/tokens/%00"), ("POST", "/keys/%00:revoke"),
    ):  # fmt: skip
        answer = world.acme.http.request(method, world.acme.url(rest))
        assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND"), rest
    assert world.operator.get("/v1/tenants/%00/policy").status_code == 404
    assert world.client(None).get("/v1/tenants/%00/policy").status_code == 401


def test_base_models(world: World, package: Package) -> None:
    for base_id in ("\0", "a\0b"):
        asked = world.acme.http.get("/v1/base-models/table", params={"id": base_id, "revision": "7" * 40})
        body = {**package.declaration("finance"), "base": {"id": base_id, "revision": "7" * 40}}
        declared = world.acme.http.post(world.acme.url("/uploads"), json=body)
        assert asked.json()["code"] == declared.json()["code"] == "BASE_NOT_REGISTERED"


def test_the_net_below_all_of_them(world: World) -> None:
    with pytest.raises(AdapterdError) as caught, world.context.services.db.read() as session:
        session.scalar(select(TenantRow).where(TenantRow.name == "\ud800"))
    assert caught.value.code is Code.REQUEST_INVALID


def test_a_field_s_name_is_not_repeated_at_length(world: World) -> None:
    answer = world.operator.post("/v1/tenants", json={"name": "t", "k" * 100_000: 1})
    assert answer.status_code == 422
    assert len(answer.content) < 5000
