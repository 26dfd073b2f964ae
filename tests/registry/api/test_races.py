"""Two at once: in each case one outcome that both can live with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from adapterd.registry.api.context import Context
from adapterd.registry.blobs.interfaces import BlobStore
from fakes.registry_world import Package, Seed, World


class MeetingBlobs:
    """A store whose first put waits until somebody else puts, too: both are past all checks then."""

    def __init__(self, inner: BlobStore, parties: int) -> None:
        self._inner = inner
        self._barrier = threading.Barrier(parties)

    def put(self, tenant: str, sha256: str, source: Any) -> None:
        # Stored first: the other one may remove the staged file as soon as both have met.
        self._inner.put(tenant, sha256, source)
        if source.name == "2":
            self._barrier.wait(timeout=60)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def meeting(rebuild: Callable[..., Context], blobs: BlobStore) -> Callable[[], Context]:
    """Servers of their own over one database and disk, that meet between their blobs and their commits."""
    shared = MeetingBlobs(blobs, 2)
    return lambda: rebuild(blobs=shared)


def test_two_processes_finalize_one_upload(world: World, package: Package, meeting: Callable[[], Context]) -> None:
    signed = package.signed(world.acme.key)
    assert list(signed.files)[2] == "model.sig"
    upload_id = world.acme.send(signed)
    contexts = meeting(), meeting()
    one, two = together(*(partial(c.admission.finalize, "acme", upload_id, actor="test") for c in contexts))
    assert (one.state, one.number) == (two.state, two.number) == ("admitted", 1)
    assert len(world.acme.http.get(world.acme.url("/adapters/finance/versions")).json()["items"]) == 1
    admitted = [e for e in world.context.services.audit.list("acme") if e.action == "version.admit"]
    assert len(admitted) == 1


def test_two_uploads_of_one_adapter_get_two_numbers(
    world: World, package: Package, meeting: Callable[[], Context]
) -> None:
    first, second = (
        world.acme.send(package.changed({"z.txt": None, "README.md": card}).signed(world.acme.key))
        for card in (b"one", b"two")
    )
    contexts = meeting(), meeting()
    done = together(
        lambda: contexts[0].admission.finalize("acme", first, actor="test"),
        lambda: contexts[1].admission.finalize("acme", second, actor="test"),
    )
    assert sorted(upload.number for upload in done) == [1, 2]


def test_the_same_content_twice_is_one_version(world: World, package: Package, meeting: Callable[[], Context]) -> None:
    signed = package.signed(world.acme.key)
    first, second = world.acme.send(signed), world.acme.send(signed)
    contexts = meeting(), meeting()
    done = together(
        lambda: contexts[0].admission.finalize("acme", first, actor="test"),
        lambda: contexts[1].admission.finalize("acme", second, actor="test"),
    )
    assert [upload.number for upload in done] == [1, 1]


def test_many_finalize_requests_of_one_upload(world: World, package: Package) -> None:
    upload_id = world.acme.send(package.signed(world.acme.key))
    answers = together(*(lambda: world.acme.finalize(upload_id) for _ in range(6)))
    assert {a.status_code for a in answers} == {202}
    assert {a.json()["state"] for a in answers} <= {"admitted", "processing"}
    assert world.acme.show(upload_id)["version"]["number"] == 1


def test_one_key_at_once_opens_one_session(world: World, package: Package) -> None:
    def create() -> Any:
        return world.acme.http.post(
            world.acme.url("/uploads"),
            json=package.declaration("finance"),
            headers={"Idempotency-Key": "once"},
        )

    assert len({a.json()["id"] for a in together(*[create] * 6)}) == 1


def test_of_two_moves_of_an_alias_one_wins(world: World, package: Package) -> None:
    digests = [world.acme.publish(package)["version_digest"]]
    digests.append(world.acme.publish(package.changed({"README.md": b"two"}))["version_digest"])
    url = world.acme.url("/adapters/finance/aliases/prod")

    def make(digest: str) -> Any:
        return world.acme.http.put(url, json={"version_digest": digest}, headers={"If-None-Match": "*"})

    answers = together(lambda: make(digests[0]), lambda: make(digests[1]))
    assert sorted(a.status_code for a in answers) == [201, 412]
    assert len(world.acme.http.get(url + "/history").json()["items"]) == 1


class HeldBlobs:
    """A store that holds its first put until the test lets it go."""

    def __init__(self, inner: BlobStore) -> None:
        self._inner = inner
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def put(self, *arguments: Any) -> None:
        self.reached.set()
        assert self.go_on.wait(60)
        self._inner.put(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_while_one_finalizes_the_others_are_told_so(
    rebuild: Callable[..., Context], seed: Seed, blobs: BlobStore, package: Package
) -> None:
    held = HeldBlobs(blobs)
    world = World(rebuild(blobs=held), seed)
    upload_id = world.acme.send(package.signed(world.acme.key))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(world.acme.finalize, upload_id)
        assert held.reached.wait(60)
        second = world.acme.finalize(upload_id)
        assert (second.status_code, second.json()["state"], second.json()["version"]) == (
            202,
            "processing",
            None,
        )
        assert world.acme.show(upload_id)["state"] == "processing"
        held.go_on.set()
        assert first.result().json()["state"] == "admitted"
    world.close()


def test_a_session_cancelled_while_it_is_finalized(
    rebuild: Callable[..., Context], seed: Seed, blobs: BlobStore, package: Package
) -> None:
    held = HeldBlobs(blobs)
    world = World(rebuild(blobs=held), seed)
    upload_id = world.acme.send(package.signed(world.acme.key))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(world.acme.finalize, upload_id)
        assert held.reached.wait(60)
        assert world.acme.http.delete(world.acme.url(f"/uploads/{upload_id}")).status_code == 204
        held.go_on.set()
        answer = first.result()
    assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")
    assert world.acme.http.get(world.acme.url("/adapters")).json()["items"] == []
    world.close()


def test_of_twenty_moves_of_an_alias_one_wins(world: World, package: Package) -> None:
    first = world.acme.publish(package, alias="prod")["version_digest"]
    cards = [package.changed({"README.md": bytes([n])}) for n in b"ab"]
    digests = [world.acme.publish(card)["version_digest"] for card in cards]
    url = world.acme.url("/adapters/finance/aliases/prod")

    def move(digest: str) -> Any:
        return world.acme.http.put(url, json={"version_digest": digest}, headers={"If-Match": f'"{first}"'})

    answers = together(*(partial(move, digests[n % 2]) for n in range(20)))
    assert sorted(a.status_code for a in answers) == [200] + [412] * 19
    won = next(a.json()["version_digest"] for a in answers if a.status_code == 200)
    assert {a.headers["ETag"] for a in answers} == {f'"{won}"'}
    assert len(world.acme.http.get(url + "/history").json()["items"]) == 2
    assert world.context.services.audit.verify("acme").ok
