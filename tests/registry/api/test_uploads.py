"""Sessions: what is declared, what is taken, what is kept."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapterd.registry.api.context import Context
from adapterd.registry.uploads.staging import StagingArea
from fakes.clock import FakeClock
from fakes.registry_world import CONFIG, SIGNATURE, WEIGHTS, Package, Seed, Tenant, World


def code(answer: Any) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["code"]


def test_a_signed_package_becomes_version_one(world: World, package: Package) -> None:
    signed = package.signed(world.acme.key)
    upload_id = world.acme.send(signed, alias="prod")
    answer = world.acme.finalize(upload_id).json()
    assert (answer["id"], answer["state"], answer["problems"]) == (upload_id, "admitted", [])
    version = answer["version"]
    assert (version["tenant"], version["adapter"], version["number"]) == ("acme", "finance", 1)
    assert version["version_digest"] == package.digest
    assert version["publisher"] == world.acme.key.public.key_id
    assert [f["path"] for f in version["files"]] == [CONFIG, WEIGHTS]
    assert version["signature"]["path"] == SIGNATURE
    assert version["manifest"]["version_digest"] == package.digest
    (item,) = world.acme.resolve("acme/finance:prod")
    assert item["version_digest"] == package.digest


def test_the_session_tells_what_is_here(world: World, package: Package) -> None:
    upload = world.acme.open(package)
    assert upload["state"] == "open"
    assert {f["path"]: f["offset"] for f in upload["files"]} == {CONFIG: 0, WEIGHTS: 0}
    data = package.files[CONFIG]
    answer = world.acme.patch(upload["id"], CONFIG, data[:10])
    assert (answer.status_code, answer.headers["Upload-Offset"]) == (204, "10")
    assert {f["path"]: f["offset"] for f in world.acme.show(upload["id"])["files"]} == {
        CONFIG: 10,
        WEIGHTS: 0,
    }
    assert world.acme.patch(upload["id"], CONFIG, data[10:], 10).headers["Upload-Offset"] == str(len(data))


def test_a_wrong_offset_is_told_the_right_one(world: World, package: Package) -> None:
    upload_id = world.acme.open(package)["id"]
    world.acme.patch(upload_id, CONFIG, package.files[CONFIG][:7])
    for offset in (0, 6, 8):
        answer = world.acme.patch(upload_id, CONFIG, b"x", offset)
        assert code(answer) == (409, "OFFSET_MISMATCH")
        assert answer.headers["Upload-Offset"] == "7"


@pytest.mark.parametrize("headers", [{}, {"Upload-Offset": "-1"}, {"Upload-Offset": "one"}])
def test_an_offset_is_needed(world: World, package: Package, headers: dict[str, str]) -> None:
    upload_id = world.acme.open(package)["id"]
    answer = world.acme.http.patch(
        world.acme.url(f"/uploads/{upload_id}/files/{CONFIG}"), content=b"x", headers=headers
    )
    assert code(answer) == (422, "REQUEST_INVALID")


def test_never_more_than_declared(world: World, package: Package, tmp_path: Path) -> None:
    upload_id = world.acme.open(package)["id"]
    size = len(package.files[CONFIG])
    assert code(world.acme.patch(upload_id, CONFIG, b"x" * (size + 1))) == (422, "REQUEST_INVALID")
    assert staged_bytes(tmp_path) == 0, "the length alone was reason enough"

    def pieces() -> Any:  # no Content-Length
        yield b"x" * size
        yield b"x"

    assert code(world.acme.patch(upload_id, CONFIG, pieces())) == (422, "REQUEST_INVALID")
    assert staged_bytes(tmp_path) <= size


def test_a_file_that_was_not_declared_is_not_there(world: World, package: Package, tmp_path: Path) -> None:
    upload_id = world.acme.open(package)["id"]
    for name in ("README.md", "..%2F..%2Fevil", "%2Fetc%2Fpasswd"):
        assert code(world.acme.patch(upload_id, name, b"x")) == (404, "NOT_FOUND")
    assert staged_bytes(tmp_path) == 0


def test_names_never_become_paths(world: World, package: Package, tmp_path: Path) -> None:
    world.acme.send(package)
    staged = [p.name for p in (tmp_path / "uploads").rglob("*") if p.is_file()]
    assert sorted(staged) == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adapter_model.bin", "FORBIDDEN_FILE"), ("run.py", "FORBIDDEN_FILE"), ("../config.json", "ARCHIVE_PATH"),
        ("training_args.json", "UNEXPECTED_FILE"), ("other.safetensors", "AMBIGUOUS_WEIGHTS"),
        ("a\\b", "ARCHIVE_PATH"), ("sub/adapter_config.json", "AMBIGUOUS_WEIGHTS"), (".gitignore", "UNEXPECTED_FILE"),
    ],
)  # fmt: skip
def test_names_outside_the_list_are_refused_at_once(world: World, package: Package, name: str, expected: str) -> None:
    body = package.changed({name: b"x"}).declaration("finance")
    answer = world.acme.http.post(world.acme.url("/uploads"), json=body)
    assert code(answer) == (422, expected)


def test_sizes_are_judged_before_a_byte_is_taken(world: World, package: Package, tmp_path: Path) -> None:
    world.operator.put(world.acme.url("/policy"), json={"limits": {"max_total_bytes": 5000, "max_config_bytes": 50}})
    answer = world.acme.http.post(world.acme.url("/uploads"), json=package.declaration("finance"))
    assert code(answer) == (422, "CONFIG_TOO_LARGE")
    assert {p["code"] for p in answer.json()["problems"]} == {"CONFIG_TOO_LARGE", "QUOTA_EXCEEDED"}
    assert not (tmp_path / "uploads").exists()


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ({"adapter": "Finance"}, (400, "REF_INVALID")),
        ({"alias": "a/b"}, (400, "REF_INVALID")),
        ({"files": []}, (422, "MISSING_CONFIG")),
        ({"allow": ["NO_SUCH_CODE"]}, (422, "REQUEST_INVALID")),
        ({"allow": ["ZERO_DELTA"]}, (422, "REQUEST_INVALID")),
        ({"extra": 1}, (422, "REQUEST_INVALID")),
        ({"base": {"id": "tests/tiny-llama", "revision": "main"}}, (400, "REF_INVALID")),
        ({"base": {"id": "tests/tiny-llama", "revision": "8" * 40}}, (404, "BASE_NOT_REGISTERED")),
        ({"files": [{"path": CONFIG, "size": 1, "sha256": "a" * 64}] * 2}, (422, "REQUEST_INVALID")),
        ({"files": [{"path": CONFIG, "size": -1, "sha256": "a" * 64}]}, (422, "REQUEST_INVALID")),
        ({"files": [{"path": CONFIG, "size": 1, "sha256": "A" * 64}]}, (422, "REQUEST_INVALID")),
        ({"files": [{"path": CONFIG, "size": 1, "sha256": "a" * 64}]}, (422, "MISSING_WEIGHTS")),
    ],
)  # fmt: skip
def test_declarations_that_cannot_be(world: World, package: Package, over: dict[str, Any], expected: Any) -> None:
    body = {**package.declaration("finance"), **over}
    assert code(world.acme.http.post(world.acme.url("/uploads"), json=body)) == expected


def test_an_idempotency_key_gives_the_same_session(world: World, package: Package) -> None:
    def create(key: str, **over: Any) -> Any:
        body = package.declaration("finance", **over)
        return world.acme.http.post(world.acme.url("/uploads"), json=body, headers={"Idempotency-Key": key})

    first, again, other = create("k1"), create("k1"), create("k2")
    assert first.json() == again.json()
    assert other.json()["id"] != first.json()["id"]
    assert code(create("k1", alias="prod")) == (409, "CONFLICT")
    theirs = world.zeta.http.post(
        world.zeta.url("/uploads"), json=package.declaration("finance"), headers={"Idempotency-Key": "k1"}
    )
    assert theirs.status_code == 201
    assert theirs.json()["id"] != first.json()["id"]


def test_finalizing_too_early_names_what_is_missing(world: World, package: Package) -> None:
    upload_id = world.acme.open(package)["id"]
    world.acme.patch(upload_id, CONFIG, package.files[CONFIG])
    world.acme.patch(upload_id, WEIGHTS, package.files[WEIGHTS][:300])
    answer = world.acme.finalize(upload_id)
    assert code(answer) == (409, "UPLOAD_INCOMPLETE")
    (problem,) = answer.json()["problems"]
    assert problem["where"] == WEIGHTS
    size = len(package.files[WEIGHTS])
    assert problem["message"] == f"bytes 300 to {size - 1} of {size} are missing"
    assert world.acme.show(upload_id)["state"] == "open"


def test_an_empty_file_needs_no_bytes(world: World, package: Package) -> None:
    with_empty = package.changed({"README.md": b""})
    version = world.acme.publish(with_empty)
    answer = world.acme.http.get(world.acme.version_url("finance", version["number"], "/files/README.md"))
    assert (answer.status_code, answer.content) == (200, b"")


def test_finalize_is_idempotent(world: World, package: Package) -> None:
    upload_id = world.acme.send(package.signed(world.acme.key))
    first, again = world.acme.finalize(upload_id), world.acme.finalize(upload_id)
    assert first.status_code == again.status_code == 202
    assert first.json() == again.json()
    assert len(world.acme.http.get(world.acme.url("/adapters/finance/versions")).json()["items"]) == 1


def test_the_same_content_again_is_the_same_version(world: World, package: Package) -> None:
    assert world.acme.publish(package) == world.acme.publish(package)
    assert world.acme.publish(package, adapter="other")["number"] == 1
    assert world.zeta.publish(package)["tenant"] == "zeta"


def test_after_the_end_no_more_bytes(world: World, package: Package) -> None:
    upload_id = world.acme.send(package.signed(world.acme.key))
    world.acme.finalize(upload_id)
    assert code(world.acme.patch(upload_id, CONFIG, b"x", len(package.files[CONFIG]))) == (409, "CONFLICT")


def test_a_cancelled_session_is_gone_with_its_bytes(world: World, package: Package, tmp_path: Path) -> None:
    upload_id = world.acme.send(package)
    assert world.acme.http.delete(world.acme.url(f"/uploads/{upload_id}")).status_code == 204
    assert code(world.acme.http.get(world.acme.url(f"/uploads/{upload_id}"))) == (404, "NOT_FOUND")
    assert staged_bytes(tmp_path) == 0


def test_an_expired_session_is_gone_and_swept(world: World, package: Package, clock: FakeClock, tmp_path: Path) -> None:
    lost, kept = world.acme.send(package), ""
    clock.advance(hours=20)
    with_card = package.changed({"README.md": b"card"})
    kept = world.acme.send(with_card)
    clock.advance(hours=4)
    assert code(world.acme.http.get(world.acme.url(f"/uploads/{lost}"))) == (404, "NOT_FOUND")
    world.context.janitor.sweep()
    assert {p.name for p in (tmp_path / "uploads").iterdir()} == {kept}


def test_staged_bytes_without_a_session_are_swept(world: World, package: Package, tmp_path: Path) -> None:
    kept = world.acme.send(package)
    orphan = tmp_path / "uploads" / ("f" * 32)
    orphan.mkdir()
    (orphan / "0").write_bytes(b"left by a kill")
    world.context.janitor.sweep()
    assert {p.name for p in (tmp_path / "uploads").iterdir()} == {kept}


def test_an_interrupted_transfer_keeps_what_came_and_resumes(world: World, package: Package) -> None:
    signed = package.signed(world.acme.key)
    upload_id = world.acme.send_all_but(signed, WEIGHTS)
    data = signed.files[WEIGHTS]
    cut_off(world, world.acme, upload_id, WEIGHTS, [data[:200], data[200:900]])
    offsets = {f["path"]: f["offset"] for f in world.acme.show(upload_id)["files"]}
    assert offsets[WEIGHTS] == 900
    assert world.acme.patch(upload_id, WEIGHTS, data[900:], 900).status_code == 204
    assert world.acme.finalize(upload_id).json()["version"]["version_digest"] == package.digest


def test_a_second_writer_of_a_file_is_turned_away(world: World, package: Package, staging: StagingArea) -> None:
    upload_id = world.acme.open(package)["id"]
    upload = world.context.uploads.get("acme", upload_id)
    with staging.receiver(upload_id, upload.files[0], 0):
        assert code(world.acme.patch(upload_id, upload.files[0].declared.path, b"x")) == (409, "CONFLICT")
    assert world.acme.patch(upload_id, upload.files[0].declared.path, b"x").status_code == 204


class SmallDisk:
    """`os.write` onto a disk with so much room."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, fd: int, data: Any) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(fd, data[: self.room])
        self.room -= written
        return written


def test_a_full_disk_is_said_and_the_upload_resumes(
    rebuild: Callable[..., Context], seed: Seed, package: Package, tmp_path: Path
) -> None:
    disk = SmallDisk(1_000_000)
    world = World(rebuild(staging=StagingArea(tmp_path / "uploads", write=disk)), seed)
    signed = package.signed(world.acme.key)
    upload_id = world.acme.send_all_but(signed, WEIGHTS)
    disk.room = 1000
    answer = world.acme.patch(upload_id, WEIGHTS, signed.files[WEIGHTS])
    assert code(answer) == (507, "STORAGE_FULL")
    assert {f["path"]: f["offset"] for f in world.acme.show(upload_id)["files"]}[WEIGHTS] == 1000
    disk.room = 1_000_000
    assert world.acme.patch(upload_id, WEIGHTS, signed.files[WEIGHTS][1000:], 1000).status_code == 204
    assert world.acme.finalize(upload_id).json()["state"] == "admitted"
    world.close()


def staged_bytes(tmp_path: Path) -> int:
    return sum(p.stat().st_size for p in (tmp_path / "uploads").rglob("*") if p.is_file())


def cut_off(world: World, tenant: Tenant, upload_id: str, path: str, pieces: list[bytes]) -> None:
    """A PATCH whose client goes away after these pieces: the bare ASGI conversation of such a request."""
    body = iter(pieces)
    headers = {"authorization": tenant.http.headers["Authorization"], "upload-offset": "0", "host": "test"}
    url = tenant.url(f"/uploads/{upload_id}/files/{path}")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "PATCH", "scheme": "http",
        "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": "",
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()], "server": ("test", 80),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        piece = next(body, None)
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": True}

    async def send(_message: Any) -> None:
        """Nobody listens."""

    asyncio.run(world.app(scope, receive, send))
