"""Temporary folders that go with their process, however it ends: who makes one sweeps what killed processes left.

In each lies a small file that whoever uses the folder has locked, and the kernel drops a lock with its process. So a
folder with anything else in it and without such a file is none of ours, and one whose file can be locked alone is
nobody's any more. An empty one is of a process that was killed before it had made the file, or makes another.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "adapterd-"
_OWNED = ".adapterd-owned"
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def scratch_folder(kind: str, inside: Path | None = None) -> Iterator[Path]:
    """A new folder that nobody else may enter, removed with the context. Raises OSError.

    Args:
        kind: part of its name.
        inside: where, if not where temporary files are.
    """
    root, prefix = inside or Path(tempfile.gettempdir()), f"{PREFIX}{kind}-"
    _sweep(root, prefix)
    path, lock = _make(root, prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


@contextmanager
def shared_folder(path: Path) -> Iterator[None]:
    """Somebody else's scratch folder is not swept meanwhile. Nothing happens if it is none, or gone."""
    lock = None
    with suppress(OSError):
        lock = os.open(path / _OWNED, _OPEN)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _make(root: Path, prefix: str) -> tuple[Path, int]:
    """Made, locked, and still there: a sweep in between takes it for a dead one's."""
    while True:
        path = root / f"{prefix}{secrets.token_hex(4)}"
        try:
            path.mkdir(0o700)
            lock = os.open(path / _OWNED, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        except (FileExistsError, FileNotFoundError):
            if not root.is_dir():
                raise
            continue
        except BaseException:
            with suppress(OSError):
                path.rmdir()
            raise
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path / _OWNED)):  # noqa: PTH116
                return path, lock
        os.close(lock)


def _sweep(root: Path, prefix: str) -> None:
    names: list[str] = []
    with suppress(OSError), os.scandir(root) as found:  # one may make folders where one may not look
        names += [each.name for each in found if each.name.startswith(prefix)]
    for name in names:
        with suppress(OSError):
            (root / name).rmdir()  # only an empty one goes
        with suppress(OSError):
            lock = os.open(root / name / _OWNED, _OPEN)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(root / name, ignore_errors=True)
            finally:
                os.close(lock)
