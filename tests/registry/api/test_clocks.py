"""A server whose clock is put back an hour, or far ahead and back: what it says stays true, in the right order."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from adapterd.loader.trust.admission import open_statement
from fakes.clock import FakeClock
from fakes.registry_world import Package, World


def statement(world: World, version: dict[str, Any]) -> Any:
    data = world.acme.http.get(world.acme.version_url("finance", version["number"], "/admission")).content
    return open_statement(data, world.context.admission_keys)


def test_an_hour_back_between_any_two_calls(world: World, package: Package, clock: FakeClock) -> None:
    first = world.acme.publish(package, alias="prod")
    second = package.changed({"README.md": b"second"}).signed(world.acme.key)
    upload = world.acme.open(second)
    clock.advance(hours=-1)
    for name, data in second.files.items():
        assert world.acme.patch(upload["id"], name, data).status_code == 204
    clock.advance(hours=-1)
    version = world.acme.finalize(upload["id"]).json()["version"]
    assert (first["number"], version["number"]) == (1, 2)
    assert statement(world, version).issued_at < statement(world, first).issued_at
    moved = world.acme.http.put(
        world.acme.url("/adapters/finance/aliases/prod"),
        json={"version_digest": version["version_digest"]}, headers={"If-Match": f'"{first["version_digest"]}"'},
    )  # fmt: skip
    assert moved.status_code == 200
    assert world.acme.resolve("acme/finance:prod")[0]["number"] == 2
    history = world.acme.http.get(world.acme.url("/adapters/finance/aliases/prod/history")).json()["items"]
    assert [item["number"] for item in history] == [2, 1], "newest first, whatever the times say"
    assert world.context.services.audit.verify("acme").ok


def test_an_upload_opened_by_a_clock_that_was_ahead_lives_on_and_counts(
    world: World, package: Package, clock: FakeClock
) -> None:
    clock.advance(hours=1)
    upload_id = world.acme.send(package.signed(world.acme.key))
    clock.advance(hours=-1)
    world.context.janitor.sweep()
    shown = world.acme.show(upload_id)
    assert shown["state"] == "open"
    assert (datetime.fromisoformat(shown["expires_at"]) - clock()).total_seconds() == 25 * 3600
    assert world.acme.finalize(upload_id).json()["state"] == "admitted"


def test_what_was_swept_by_a_clock_far_ahead_is_gone_and_can_be_sent_anew(
    world: World, package: Package, clock: FakeClock
) -> None:
    lost = world.acme.send(package.signed(world.acme.key))
    clock.advance(days=3)
    world.context.janitor.sweep()
    clock.advance(days=-3)
    assert world.acme.http.get(world.acme.url(f"/uploads/{lost}")).json()["code"] == "NOT_FOUND"
    assert world.acme.patch(lost, "README.md", b"x").json()["code"] == "NOT_FOUND"
    world.acme.publish(package)


def test_a_token_lasts_until_its_moment_by_the_clock_of_the_server(world: World, clock: FakeClock) -> None:
    client = world.client(world.token("acme", "adapters:read"))
    ends = datetime.fromisoformat(client.get("/v1/whoami").json()["expires_at"])
    clock.now = ends
    assert client.get("/v1/whoami").json()["code"] == "TOKEN_EXPIRED"
    clock.advance(microseconds=-1)
    assert client.get("/v1/whoami").status_code == 200
    clock.advance(hours=-1)
    assert client.get("/v1/whoami").status_code == 200
    given = world.acme.http.post(
        world.acme.url("/tokens"), json={"kind": "s", "scopes": ["adapters:read"], "expires_in_days": 1}
    )  # fmt: skip
    assert given.status_code == 201, given.text
