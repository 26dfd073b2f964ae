"""A file appears under its name whole, or not at all; what a killed process had begun goes with the next one.

It is begun under another name, beside its own, and locked meanwhile: the kernel drops a lock with its process. So a
part that can be locked is nobody's any more.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".part"
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ANY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_whole(path: Path, data: bytes, *, replace: bool = False, mode: int = 0o600) -> None:
    """`data` at `path`, complete or not at all, with `mode` from the start.

    Raises:
        FileExistsError: something is there and `replace` is off.
        OSError: about `path`, whatever name it was on its way under.
    """
    try:
        sweep_parts(path.parent, _prefix(path))
        with part(path.parent, _prefix(path), mode) as (place, descriptor):
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            if replace:
                place.replace(path)
            else:
                path.hardlink_to(place)  # unlike a rename, a link never takes the place of a file
    except OSError as fault:
        raise OSError(fault.errno, fault.strerror, str(path)) from fault


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """For who reads a file there, changes it and writes it again: one process after the other, or a change is lost.

    Raises OSError where there is no such folder. A file system without locks keeps nobody waiting.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Faults that come without a name, as those of writes do, are about `path`."""
    try:
        yield
    except OSError as fault:
        if fault.filename is not None:
            raise
        raise OSError(fault.errno, fault.strerror, str(path)) from fault


def sweep_beside(path: Path) -> None:
    """Remove what processes that were killed had begun to write at `path`. What cannot be removed stays."""
    sweep_parts(path.parent, _prefix(path))


@contextmanager
def part(folder: Path, prefix: str = "", mode: int = 0o600) -> Iterator[tuple[Path, int]]:
    """A new file and its descriptor, gone when the block ends unless it was renamed. Raises OSError."""
    place, descriptor = _begun(folder, prefix, mode)
    try:
        yield place, descriptor
    finally:
        with suppress(OSError):
            place.unlink()
        os.close(descriptor)


def sweep_parts(folder: Path, prefix: str = "") -> None:
    """Remove the parts there that no process has locked. What cannot be removed stays."""
    with suppress(OSError), os.scandir(folder) as found:
        for each in found:
            if each.name.startswith(prefix) and each.name.endswith(SUFFIX):
                with suppress(OSError):
                    _remove_unless_locked(folder / each.name)


def _prefix(path: Path) -> str:
    return f".{os.fsdecode(os.fsencode(path.name)[:200])}."


def _begun(folder: Path, prefix: str, mode: int) -> tuple[Path, int]:
    """Made, locked, and still there: a sweep in between takes it for a dead process's."""
    while True:
        place = folder / f"{prefix}{secrets.token_hex(8)}{SUFFIX}"
        descriptor = os.open(place, _NEW, mode)
        with suppress(OSError):
            if _is_ours(descriptor) and os.path.samestat(os.fstat(descriptor), place.lstat()):
                return place, descriptor
        os.close(descriptor)


def _is_ours(descriptor: int) -> bool:
    """Locked; or not to be locked at all, for there nobody sweeps."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # who sweeps has it and is about to remove it
    except OSError:
        return True
    return True


def _remove_unless_locked(place: Path) -> None:
    descriptor = os.open(place, _ANY)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            place.unlink()
    finally:
        os.close(descriptor)
