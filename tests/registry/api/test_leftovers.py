"""However an upload ends, its bytes stay if a version has them, or an open upload may still bring them into one."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from adapterd.loader.errors import Code, error
from adapterd.loader.trust import oms
from adapterd.loader.trust.keys import PrivateKey
from adapterd.registry.api.context import Context
from adapterd.registry.api.lanes import Lanes
from adapterd.registry.api.observe import Observer
from adapterd.registry.app import build_context
from adapterd.registry.blobs.interfaces import BlobStore
from adapterd.registry.blobs.local import LocalBlobs
from adapterd.registry.catalog.models import VersionFileRow
from adapterd.registry.database import Database
from adapterd.registry.services import build_services
from adapterd.registry.uploads.interfaces import StagingQuota
from adapterd.registry.uploads.staging import StagingArea
from fakes.clock import FakeClock
from fakes.registry_world import SIGNATURE, TOKEN_SECRET, WEIGHTS, Package, Seed, World

ELSEWHERE = pytest.mark.parametrize(("kind", "store"), [("sqlite", "local"), ("postgres", "s3")])


def there(blobs: BlobStore, package: Package, tenant: str = "acme") -> set[str]:
    """The files of a package whose bytes the store has."""
    return {f.path for f in package.entries if blobs.size(tenant, f.sha256) is not None}


class StoppedBlobs:
    """A store where something happens when the signature, which comes last, is to be put."""

    def __init__(self, inner: BlobStore, happens: Callable[[], None]) -> None:
        self._inner = inner
        self._happens = happens

    def put(self, tenant: str, sha256: str, source: Any) -> None:
        if source.name == "2":
            self._happens()
        self._inner.put(tenant, sha256, source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def full() -> None:
    raise error(Code.STORAGE_FULL, "blobs", "no space left")


@pytest.fixture
def half_stored(rebuild: Callable[..., Context], seed: Seed, blobs: BlobStore, package: Package) -> tuple[Package, str]:
    """An open upload of acme's, with two of its three files in the store."""
    world = World(rebuild(blobs=StoppedBlobs(blobs, full)), seed)
    signed = package.signed(world.acme.key)
    assert list(signed.files)[2] == SIGNATURE
    upload_id = world.acme.send(signed)
    assert world.acme.finalize(upload_id).json()["code"] == "STORAGE_FULL"
    assert there(blobs, signed) == set(package.files)
    world.close()
    return signed, upload_id


@ELSEWHERE
def test_an_upload_that_is_cancelled(world: World, half_stored: tuple[Package, str], blobs: BlobStore) -> None:
    signed, upload_id = half_stored
    assert world.acme.http.delete(world.acme.url(f"/uploads/{upload_id}")).status_code == 204
    assert there(blobs, signed) == set()


@ELSEWHERE
def test_an_upload_that_expires(
    world: World, half_stored: tuple[Package, str], blobs: BlobStore, clock: FakeClock, staging: StagingArea
) -> None:
    signed, _ = half_stored
    clock.advance(hours=23)
    world.context.janitor.sweep()
    assert there(blobs, signed) != set(), "until then it may be finalized again"
    clock.advance(hours=1)
    world.context.janitor.sweep()
    assert (there(blobs, signed), staging.ids()) == (set(), frozenset())


def test_an_upload_that_is_finalized_again(world: World, half_stored: tuple[Package, str], blobs: BlobStore) -> None:
    signed, upload_id = half_stored
    assert world.acme.finalize(upload_id).json()["state"] == "admitted"
    assert there(blobs, signed) == set(signed.files)


def test_an_upload_that_is_refused_after_all(
    world: World, half_stored: tuple[Package, str], blobs: BlobStore, staging: StagingArea
) -> None:
    signed, upload_id = half_stored
    staged = staging.path(upload_id, world.context.uploads.get("acme", upload_id).files[1])
    staged.write_bytes(bytes(staged.stat().st_size))  # a disk that forgets
    assert "HASH_MISMATCH" in {p["code"] for p in world.acme.finalize(upload_id).json()["problems"]}
    assert (there(blobs, signed), staging.ids()) == (set(), frozenset())


def test_bytes_that_another_open_upload_declares_stay(
    world: World, half_stored: tuple[Package, str], blobs: BlobStore, package: Package
) -> None:
    signed, upload_id = half_stored
    other = world.acme.open(package.changed({"README.md": b"another"}), "other")["id"]
    world.zeta.open(package)  # of another tenant, which has bytes of its own
    world.acme.http.delete(world.acme.url(f"/uploads/{upload_id}"))
    assert there(blobs, signed) == set(package.files)
    world.acme.http.delete(world.acme.url(f"/uploads/{other}"))
    assert there(blobs, signed) == set()


def test_bytes_of_a_version_stay_whatever_becomes_of_other_uploads(
    world: World, package: Package, blobs: BlobStore, clock: FakeClock
) -> None:
    world.acme.publish(package)
    signed = package.signed(world.acme.key)
    for _ in range(2):
        world.acme.http.delete(world.acme.url(f"/uploads/{world.acme.send(signed, 'other')}"))
    world.acme.open(signed, "third")
    clock.advance(hours=25)
    world.context.janitor.sweep()
    assert there(blobs, signed) == set(signed.files)


def test_another_signature_of_a_version_that_is_there(world: World, package: Package, blobs: BlobStore) -> None:
    world.acme.publish(package)
    again = package.changed({SIGNATURE: oms.sign(package.entries, world.acme.key, name="again")})
    assert again.files[SIGNATURE] != package.signed(world.acme.key).files[SIGNATURE]
    answer = world.acme.finalize(world.acme.send(again)).json()
    assert (answer["state"], answer["version"]["number"]) == ("admitted", 1)
    assert there(blobs, again) == set(package.files)
    assert there(blobs, package.signed(world.acme.key)) == {*package.files, SIGNATURE}


def test_an_upload_that_is_cancelled_while_it_is_stored(
    rebuild: Callable[..., Context], seed: Seed, blobs: BlobStore, package: Package, staging: StagingArea
) -> None:
    cancelled: list[int] = []

    def cancel() -> None:
        answer = world.acme.http.delete(world.acme.url(f"/uploads/{upload_id}"))
        cancelled.append(answer.status_code)
        staged.mkdir()  # the store has opened the file by now, or another server has it on its disk
        (staged / "2").write_bytes(signed.files[SIGNATURE])

    world = World(rebuild(blobs=StoppedBlobs(blobs, cancel)), seed)
    signed = package.signed(world.acme.key)
    upload_id = world.acme.send(signed)
    upload = world.context.uploads.get("acme", upload_id)
    staged = staging.path(upload_id, upload.files[0]).parent
    assert world.acme.finalize(upload_id).status_code == 404
    assert (cancelled, there(blobs, signed)) == ([204], set())
    world.close()


def test_a_store_that_cannot_be_reached_is_asked_again_by_the_next_sweep(
    rebuild: Callable[..., Context],
    half_stored: tuple[Package, str],
    blobs: BlobStore,
    clock: FakeClock,
    staging: StagingArea,
) -> None:
    signed, _ = half_stored

    class Away:
        def delete(self, *_: Any) -> None:
            raise error(Code.STORAGE_UNAVAILABLE, "blobs", "nobody answers")

        sweep = delete

    clock.advance(hours=25)
    assert rebuild(blobs=Away()).janitor.sweep() == 1
    assert there(blobs, signed) != set()
    assert staging.ids() == frozenset(), "what can go goes first"
    rebuild().janitor.sweep()
    assert there(blobs, signed) == set()


def test_the_key_of_an_expired_upload_opens_a_new_one(world: World, package: Package, clock: FakeClock) -> None:
    """Nobody has swept yet: what is told must not be an upload that is nowhere to be found."""

    def ask() -> dict[str, Any]:
        headers = {"Idempotency-Key": "k1"}
        answer = world.acme.http.post(world.acme.url("/uploads"), json=package.declaration("finance"), headers=headers)
        assert answer.status_code == 201
        return answer.json()

    first = ask()
    assert ask()["id"] == first["id"]
    world.acme.patch(first["id"], WEIGHTS, package.files[WEIGHTS][:100])
    clock.advance(hours=25)
    second = ask()
    assert second["id"] != first["id"]
    assert world.acme.show(second["id"])["files"][1]["offset"] == 0


class SometimesFull:
    """A store that refuses the n-th put from now on, once."""

    def __init__(self, inner: BlobStore) -> None:
        self._inner = inner
        self.left = -1

    def put(self, *arguments: Any) -> None:
        self.left -= 1
        if self.left == -1:
            full()
        self._inner.put(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["open", "finalize", "finalize", "fail", "cancel", "expire"]),
        st.integers(0, 2),  # which content, or which upload
        st.integers(0, 3),  # which adapter and signature, or which put fails
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(moves=MOVES)
def test_whatever_happens_a_version_has_its_bytes_and_nothing_else_is_there_at_the_end(
    seeded: tuple[Path, Seed], admission_key: PrivateKey, package: Package, moves: list[tuple[str, int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder, closing_world(Path(folder), seeded, admission_key) as play:
        world, blobs, clock = play
        uploads: list[str] = []
        used: set[str] = set()
        for move, which, detail in moves:
            if move == "open":
                content = package.changed({"README.md": b"card %d" % which})
                bundle = oms.sign(content.entries, world.acme.key, name=f"name {detail % 2}")
                content = content.changed({SIGNATURE: bundle})
                uploads.append(world.acme.send(content, f"a{detail // 2}"))
                used.update(f.sha256 for f in content.entries)
            elif uploads and move in ("finalize", "fail"):
                blobs.left = detail if move == "fail" else -1
                world.acme.finalize(uploads[which % len(uploads)])
            elif uploads and move == "cancel":
                world.acme.http.delete(world.acme.url(f"/uploads/{uploads.pop(which % len(uploads))}"))
            elif move == "expire":
                clock.advance(hours=25)
                world.context.janitor.sweep()
            needed = versions_need(world)
            assert all(blobs.size("acme", sha256) is not None for sha256 in needed)
        clock.advance(hours=25)
        world.context.janitor.sweep()
        assert {sha256 for sha256 in used if blobs.size("acme", sha256) is not None} == versions_need(world)


def versions_need(world: World) -> set[str]:
    with world.context.services.db.read() as session:
        return set(session.scalars(select(VersionFileRow.sha256)))


@contextmanager
def closing_world(
    folder: Path, seeded: tuple[Path, Seed], key: PrivateKey
) -> Iterator[tuple[World, SometimesFull, FakeClock]]:
    """A registry of its own for one example."""
    shutil.copyfile(seeded[0], folder / "registry.sqlite3")
    db, clock = Database(f"sqlite:///{folder / 'registry.sqlite3'}"), FakeClock()
    blobs = SometimesFull(LocalBlobs(folder / "blobs"))
    context = build_context(
        build_services(db, TOKEN_SECRET, clock), blobs=blobs, staging=StagingArea(folder / "uploads"), key=key,
        observer=Observer(io.StringIO()), clock=clock, upload_lifetime=timedelta(hours=24),
        upload_quota=StagingQuota(), lanes=Lanes(2),
    )  # fmt: skip
    world = World(context, seeded[1])
    try:
        yield world, blobs, clock
    finally:
        world.close()
        db.dispose()
