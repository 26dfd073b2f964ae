"""Starts a loader process for a worker: `subprocess`, never fork, and nothing of the worker's goes along.

Settings travel in a nameless file, since they may hold a token. A socket pair ties the two: the loader says on
it that it serves, or what is wrong, and goes (once no other worker is there) when the worker's end is closed,
by whatever.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adapterd.gpu_cache.host.process.forks import keep_from_children
from adapterd.gpu_cache.host.process.settings import LoaderSettings
from adapterd.loader.errors import AdapterdError, Code, Problem, error, error_from

START_SECONDS = 120.0
"""Touching a slab of 100 GB takes half a minute."""
MAX_WORD_BYTES = 1 << 20

Readable = Callable[[socket.socket, float], bool]
"""Waits for a socket to be readable, so many seconds at most; raises if the wait is to be given up."""


@dataclass(frozen=True, slots=True, eq=False)
class StartedLoader:
    """A loader process, and the tie to it."""

    process: subprocess.Popen[bytes]
    tie: socket.socket

    def close(self, timeout: float, *, shared: bool) -> None:
        """Cuts the tie. A loader that is nobody else's is waited for; it is killed when it does not go. Idempotent."""
        self.tie.close()
        if shared:
            # Others may go on with it; then it is waited for at the end of this process.
            if self.process.poll() is None:
                _reap_later(self.process)
            return
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Starter:
    """Starts loaders on one socket.

    Args:
        settings: of the loader.
        path: of the socket.
    """

    def __init__(self, settings: LoaderSettings, path: Path) -> None:
        self._settings, self._path = settings, path

    def start(self, readable: Readable) -> StartedLoader | None:
        """A loader that serves the socket; None if another one does already.

        Raises:
            AdapterdError: what the loader says is wrong. Unavailable: LOADER_UNAVAILABLE if it says nothing.
        """
        ours, its = socket.socketpair()
        keep_from_children(ours, its)
        with its:
            started = StartedLoader(self._spawn(its), ours)
        try:
            word = self._first_word(started, readable)
        except BaseException:
            started.close(0, shared=False)
            raise
        if word is None:
            return started
        started.close(START_SECONDS, shared=False)
        if word[0].code is Code.CONFLICT:
            return None
        raise error_from(word)

    def _spawn(self, tie: socket.socket) -> subprocess.Popen[bytes]:
        settings = os.memfd_create("adapterd-settings", os.MFD_CLOEXEC)
        try:
            with open(settings, "wb", closefd=False) as file:
                file.write(self._settings.as_json())
            os.lseek(settings, 0, os.SEEK_SET)
            return subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [
                    sys.executable, "-m", "adapterd.gpu_cache.host.process", "--config", str(settings),
                    "--socket", str(self._path), "--starter-fd", str(tie.fileno()),
                ],
                pass_fds=[settings, tie.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the worker is the worker's
            )  # fmt: skip
        except OSError as cause:
            raise _unavailable(f"it cannot be started: {cause}") from cause
        finally:
            os.close(settings)

    def _first_word(self, started: StartedLoader, readable: Readable) -> list[Problem] | None:
        """What is wrong, or None: it serves."""
        said = b""
        while not said.endswith(b"\n"):
            if not readable(started.tie, START_SECONDS):
                raise _unavailable(f"it did not serve within {START_SECONDS:g} seconds")
            more = started.tie.recv(1 << 16)
            if not more or len(said) > MAX_WORD_BYTES:
                status = started.process.wait()
                raise _unavailable(f"it ended at its start with status {status}; its log says why")
            said += more
        word = json.loads(said)
        return None if word.get("ready") else [Problem.from_json(problem) for problem in word["problems"]]


def _reap_later(process: subprocess.Popen[bytes]) -> None:
    """A thread that ends with the loader: nobody else waits for it, and a zombie is a leak."""
    import threading

    threading.Thread(target=process.wait, name="adapterd-loader-reaper", daemon=True).start()


def _unavailable(message: str) -> AdapterdError:
    return error(Code.LOADER_UNAVAILABLE, "loader process", message)
