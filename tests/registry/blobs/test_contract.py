"""One suite for every blob store: local disk, and S3 on a real server."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapterd.loader.errors import Code, Failed, NotFound, Refused
from adapterd.registry.blobs.interfaces import CHUNK_BYTES, BlobStore, blob_key

DATA = b"0123456789" * 7
Damage = Callable[[str, str, bytes], None]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Callable[[bytes], Path]:
    def make(data: bytes) -> Path:
        path = tmp_path / f"source-{digest(data)[:8]}"
        path.write_bytes(data)
        return path

    return make


def read(blobs: BlobStore, tenant: str, sha256: str, offset: int = 0, length: int | None = None) -> bytes:
    return b"".join(blobs.read(tenant, sha256, offset, length))


@pytest.mark.parametrize("data", [b"", b"x", DATA, bytes(range(256)) * (5 * CHUNK_BYTES // 512)], ids=len)
def test_what_is_put_is_read(data: bytes, blobs: BlobStore, file: Callable[[bytes], Path]) -> None:
    sha256 = digest(data)
    assert blobs.size("acme", sha256) is None
    blobs.put("acme", sha256, file(data))
    blobs.check()
    blobs.sweep()
    assert blobs.size("acme", sha256) == len(data)
    pieces = list(blobs.read("acme", sha256))
    assert b"".join(pieces) == data
    assert all(0 < len(piece) <= CHUNK_BYTES for piece in pieces)


@pytest.mark.parametrize("offset", [0, 1, 69, 70, 71, 1000])
def test_ranges(offset: int, blobs: BlobStore, file: Callable[[bytes], Path]) -> None:
    blobs.put("acme", digest(DATA), file(DATA))
    for length in (None, 0, 1, 5, 70, 1000):
        end = None if length is None else offset + length
        assert read(blobs, "acme", digest(DATA), offset, length) == DATA[offset:end], length


def test_put_again_changes_nothing(blobs: BlobStore, file: Callable[[bytes], Path]) -> None:
    for _ in range(2):
        blobs.put("acme", digest(DATA), file(DATA))
    assert read(blobs, "acme", digest(DATA)) == DATA


def test_many_writers_of_the_same_bytes(blobs: BlobStore, file: Callable[[bytes], Path]) -> None:
    source = file(DATA)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(blobs.put, "acme", digest(DATA), source) for _ in range(4)]:
            done.result()
    assert read(blobs, "acme", digest(DATA)) == DATA


def test_bytes_that_hash_to_something_else_are_not_stored(blobs: BlobStore, file: Callable[[bytes], Path]) -> None:
    wanted = digest(b"other")
    with pytest.raises(Refused) as caught:
        blobs.put("acme", wanted, file(DATA))
    assert caught.value.code is Code.HASH_MISMATCH
    assert caught.value.problem.where == wanted
    assert blobs.size("acme", wanted) is None
    assert blobs.size("acme", digest(DATA)) is None


def test_a_damaged_blob_is_put_right(blobs: BlobStore, file: Callable[[bytes], Path], damage: Damage) -> None:
    blobs.put("acme", digest(DATA), file(DATA))
    damage("acme", digest(DATA), b"9" + DATA[1:])
    assert read(blobs, "acme", digest(DATA)) == b"9" + DATA[1:]  # the reader hashes, the store does not
    blobs.put("acme", digest(DATA), file(DATA))
    assert read(blobs, "acme", digest(DATA)) == DATA


def test_nothing_is_shared_across_tenants(blobs: BlobStore, file: Callable[[bytes], Path]) -> None:
    sha256 = digest(DATA)
    blobs.put("acme", sha256, file(DATA))
    assert blobs.size("other", sha256) is None
    blobs.put("other", sha256, file(DATA))
    blobs.delete("acme", sha256)
    assert blobs.size("acme", sha256) is None
    assert read(blobs, "other", sha256) == DATA


def test_foreign_and_missing_are_the_same_answer(blobs: BlobStore, file: Callable[[bytes], Path]) -> None:
    blobs.put("acme", digest(DATA), file(DATA))
    answers = []
    for tenant in ("other", "nobody"):
        with pytest.raises(NotFound) as caught:
            read(blobs, tenant, digest(DATA))
        answers.append(caught.value.problem)
    assert answers[0] == answers[1]


def test_delete_is_idempotent(blobs: BlobStore, file: Callable[[bytes], Path]) -> None:
    blobs.delete("acme", digest(DATA))
    blobs.put("acme", digest(DATA), file(DATA))
    for _ in range(2):
        blobs.delete("acme", digest(DATA))
    assert blobs.size("acme", digest(DATA)) is None


def test_a_reader_that_stops_early_leaves_nothing_open(blobs: BlobStore, file: Callable[[bytes], Path]) -> None:
    data = bytes(3 * CHUNK_BYTES)
    blobs.put("acme", digest(data), file(data))
    pieces = blobs.read("acme", digest(data))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    blobs.read("acme", digest(data))  # never consumed at all
    assert read(blobs, "acme", digest(data), 0, 10) == bytes(10)


@pytest.mark.parametrize("what", ["absent", "folder", "link"])
def test_a_source_must_be_a_file(what: str, blobs: BlobStore, file: Callable[[bytes], Path], tmp_path: Path) -> None:
    source = tmp_path / what
    if what == "folder":
        source.mkdir()
    elif what == "link":
        source.symlink_to(file(DATA))
    with pytest.raises(NotFound) as caught:
        blobs.put("acme", digest(DATA), source)
    assert caught.value.code is Code.PATH_NOT_FOUND
    assert blobs.size("acme", digest(DATA)) is None


@pytest.mark.parametrize("sha256", ["", "../../etc/passwd", "A" * 64, "0" * 63])
def test_only_a_digest_addresses_a_blob(sha256: str, blobs: BlobStore, file: Callable[[bytes], Path]) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: blobs.put("acme", sha256, file(DATA)),
        lambda: blobs.size("acme", sha256),
        lambda: list(blobs.read("acme", sha256)),
        lambda: blobs.delete("acme", sha256),
    ]
    for attempt in attempts:
        with pytest.raises(Failed) as caught:
            attempt()
        assert caught.value.code is Code.REF_INVALID


def test_no_name_becomes_a_path() -> None:
    sha256 = digest(DATA)
    keys = {blob_key(tenant, sha256) for tenant in ("acme", "..", "a/b", "acm", "e")}
    assert len(keys) == 5
    for key in keys:
        owner, shard, name = key.split("/")
        assert (len(owner), shard, name) == (64, sha256[:2], sha256)
