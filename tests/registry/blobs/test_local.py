"""What only the local disk can do wrong."""

from __future__ import annotations

import errno
import hashlib
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapterd.loader.errors import Code, Refused, Unavailable
from adapterd.loader.parts import part
from adapterd.registry.blobs.local import LocalBlobs, storage_error

DATA = b"x" * 300_000
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """The kernel stops every write at this size: the nearest thing to a full disk without being root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def left_behind(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_a_full_disk_leaves_nothing(tmp_path: Path, source: Path) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    with file_size_limit(100_000), pytest.raises(Unavailable) as caught:
        blobs.put("acme", SHA256, source)
    assert caught.value.code is Code.STORAGE_FULL
    assert left_behind(tmp_path / "blobs") == []
    blobs.put("acme", SHA256, source)
    assert blobs.size("acme", SHA256) == len(DATA)


def test_what_a_kill_left_half_stored_is_swept_and_what_is_being_stored_is_not(tmp_path: Path, source: Path) -> None:
    blobs, tmp = LocalBlobs(tmp_path / "blobs"), tmp_path / "blobs" / "tmp"
    blobs.put("acme", SHA256, source)
    (tmp / "0123456789abcdef.part").write_bytes(b"half")
    with part(tmp) as (mine, _):
        blobs.sweep()
        assert list(tmp.iterdir()) == [mine]
    assert blobs.size("acme", SHA256) == len(DATA)


def test_refused_bytes_leave_nothing(tmp_path: Path, source: Path) -> None:
    with pytest.raises(Refused):
        LocalBlobs(tmp_path / "blobs").put("acme", "0" * 64, source)
    assert left_behind(tmp_path / "blobs") == []


def test_files_are_private(tmp_path: Path, source: Path) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    blobs.put("acme", SHA256, source)
    path = blobs.path("acme", SHA256)
    assert left_behind(tmp_path / "blobs") == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_reader_keeps_the_bytes_it_opened(tmp_path: Path) -> None:
    data = bytes(3 << 20)
    sha256 = hashlib.sha256(data).hexdigest()
    (tmp_path / "source").write_bytes(data)
    blobs = LocalBlobs(tmp_path / "blobs")
    blobs.put("acme", sha256, tmp_path / "source")
    pieces = blobs.read("acme", sha256)
    first = next(pieces)
    blobs.put("acme", sha256, tmp_path / "source")
    blobs.delete("acme", sha256)
    assert first + b"".join(pieces) == data


def test_a_root_that_cannot_be(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").touch()
    blobs = LocalBlobs(tmp_path / "file" / "blobs")
    for attempt in (
        blobs.check,
        lambda: blobs.put("acme", SHA256, source),
        lambda: blobs.size("acme", SHA256),
    ):
        with pytest.raises(Unavailable) as caught:
            attempt()
        assert caught.value.code is Code.STORAGE_UNAVAILABLE


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, Code.STORAGE_FULL),
        (errno.EDQUOT, Code.STORAGE_FULL),
        (errno.EFBIG, Code.STORAGE_FULL),
        (errno.EIO, Code.STORAGE_UNAVAILABLE),
        (errno.EROFS, Code.STORAGE_UNAVAILABLE),
    ],
)
def test_errors_are_narrowed(number: int, code: Code) -> None:
    assert storage_error(OSError(number, "words", "file")).code is code
