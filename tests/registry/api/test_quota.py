"""What one tenant may hold in open uploads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from adapterd.loader.errors import AdapterdError, Code
from adapterd.registry.api.context import Context
from adapterd.registry.uploads.interfaces import StagingQuota
from fakes.clock import FakeClock
from fakes.registry_world import CONFIG, WEIGHTS, Package, Seed, World


@pytest.fixture
def capped(rebuild: Callable[..., Context], seed: Seed) -> Any:
    """A world under a quota."""
    made: list[World] = []

    def build(**quota: int) -> World:
        made.append(World(rebuild(upload_quota=StagingQuota(**quota)), seed))
        return made[-1]

    yield build
    for world in made:
        world.close()


def opened(world: World, package: Package, **headers: str) -> Any:
    return world.acme.http.post(world.acme.url("/uploads"), json=package.declaration("finance"), headers=headers)


def refused(answer: Any) -> bool:
    return (answer.status_code, answer.json().get("code")) == (422, "QUOTA_EXCEEDED")


def test_so_many_and_no_more(capped: Callable[..., World], package: Package) -> None:
    world = capped(uploads=2)
    first = opened(world, package, **{"Idempotency-Key": "first"})
    second = world.acme.send(package.signed(world.acme.key))
    answer = opened(world, package)
    assert refused(answer)
    assert first.json()["expires_at"] in answer.json()["hint"]
    assert opened(world, package, **{"Idempotency-Key": "first"}).json()["id"] == first.json()["id"]
    assert world.zeta.open(package)["state"] == "open", "another tenant has its own"
    assert world.acme.finalize(second).json()["state"] == "admitted"
    third = opened(world, package)
    assert third.status_code == 201
    assert refused(opened(world, package))
    world.acme.http.delete(world.acme.url(f"/uploads/{third.json()['id']}"))
    assert opened(world, package).status_code == 201


def test_declared_bytes_count(capped: Callable[..., World], package: Package) -> None:
    one = sum(f.size for f in package.entries)
    world = capped(nbytes=2 * one)
    assert [opened(world, package).status_code for _ in range(2)] == [201, 201]
    assert refused(opened(world, package))


def test_what_has_expired_holds_nothing(capped: Callable[..., World], package: Package, clock: FakeClock) -> None:
    world = capped(uploads=1)
    assert opened(world, package).status_code == 201
    assert refused(opened(world, package))
    clock.advance(hours=25)
    assert opened(world, package).status_code == 201


def test_many_at_once_share_the_last_places(capped: Callable[..., World], package: Package) -> None:
    world = capped(uploads=3)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: opened(world, package), range(12)))
    assert sorted(a.status_code for a in answers) == [201] * 3 + [422] * 9


def test_a_cancelled_upload_takes_no_more_bytes(world: World, package: Package) -> None:
    """A removed file that is still being written would hold disk that counts nowhere."""
    session = world.acme.open(package)
    upload = world.context.uploads.get("acme", session["id"])
    with world.context.uploads.receiver(upload, CONFIG, 0) as receiver:
        receiver.take(b"{")
        world.context.uploads.cancel("acme", upload.id)
        with pytest.raises(AdapterdError) as caught:
            receiver.take(b"}")
    assert (caught.value.code, receiver.offset) == (Code.CONFLICT, 1)


def test_uploads_that_were_refused_do_not_fill_the_database(capped: Any, package: Package, clock: FakeClock) -> None:
    world = capped(closed=3)
    refused = []
    for _ in range(5):
        upload_id = world.acme.open(package)["id"]
        assert world.acme.patch(upload_id, WEIGHTS, bytes(64)).status_code == 422
        refused.append(upload_id)
        clock.advance(seconds=1)
    kept = world.acme.open(package)["id"]  # an open one counts elsewhere, and is never forgotten for others
    urls = [world.acme.url(f"/uploads/{upload_id}") for upload_id in (*refused, kept)]
    assert [world.acme.http.get(url).status_code for url in urls] == [404, 404, 404, 200, 200, 200]
    world.zeta.open(package)
    assert world.acme.http.get(urls[3]).status_code == 200, "another tenant's are another tenant's"
