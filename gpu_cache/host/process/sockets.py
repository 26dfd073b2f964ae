"""The Unix socket between workers and their loader: one loader a socket, and only the same user on either side."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

from adapterd.gpu_cache.host.process.forks import keep_from_children
from adapterd.loader.errors import Code, error

MAX_PATH_BYTES = 107
"""sockaddr_un has 108 bytes, the last one a zero."""
BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Listener:
    """A listening socket, and the lock that says that its loader is alive.

    The lock goes with the process, however that ends, so that a socket file without a lock is a dead loader's.
    Its file stays: a lock on a file that somebody may remove says nothing.

    Args:
        path: of the socket.
        who: what listens, for messages.

    Raises:
        Conflict: CONFLICT if another one serves the socket.
        Failed: SETTINGS_INVALID if others than we could come near it, if the path is too long, or if something else
            than a socket is there.
        Unavailable: STORAGE_UNAVAILABLE.
    """

    def __init__(self, path: Path, who: str = "loader") -> None:
        check_path(path)
        self._who = who
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_folder(path.parent)
            lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock = os.fdopen(lock, "rb")
            try:
                self._path, self.socket = path, self._listen(path)
            except BaseException:
                self._lock.close()
                raise
            keep_from_children(self._lock, self.socket)
        except OSError as cause:
            raise error(Code.STORAGE_UNAVAILABLE, str(path), f"cannot listen there: {cause.strerror}") from cause

    def _listen(self, path: Path) -> socket.socket:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error(
                Code.CONFLICT, str(path), f"another {self._who} serves this socket", "Use that one, or another path."
            ) from None
        _remove_stale(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            before = os.umask(0o177)  # the file is never there with other rights
            try:
                listening.bind(str(path))
            finally:
                os.umask(before)
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except BaseException:
            listening.close()
            raise
        return listening

    def close(self) -> None:
        """Stops listening and takes the socket's file away. The lock is given back last. Idempotent."""
        if not self._lock.closed:
            self._path.unlink(missing_ok=True)
            self.socket.close()
            self._lock.close()


def _remove_stale(path: Path) -> None:
    """The socket of a dead one: we have the lock. Anything else that is called so is somebody's file."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise error(
                Code.SETTINGS_INVALID, str(path), "is there already, and is no socket", "Name a path of its own."
            )
        path.unlink()
    except FileNotFoundError:
        return


def check_path(path: Path) -> None:
    """Raises Failed (SETTINGS_INVALID)."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise error(
            Code.SETTINGS_INVALID, "socket", f"the path of a socket has at most {MAX_PATH_BYTES} bytes",
            "Choose a shorter one, under /run say.",
        )  # fmt: skip


def same_user(peer: socket.socket) -> bool:
    """Whether the process at the other end runs as we do."""
    size = _CREDENTIALS.size
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.geteuid())


def _check_folder(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise error(
            Code.SETTINGS_INVALID, "socket", f"{folder} is not ours alone (mode {stat.S_IMODE(found.st_mode):04o})",
            f"Run `chmod 700 {folder}`, or use a folder of its own.",
        )  # fmt: skip
