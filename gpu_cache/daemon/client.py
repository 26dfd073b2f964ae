"""The other end of the daemon's socket: one connection, one request after the other, with a time limit each."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from adapterd.gpu_cache.daemon.messages import (
    A,
    AskDrain,
    AskEvict,
    AskMetrics,
    AskPin,
    AskPrefetch,
    AskResidency,
    AskStatus,
    AskUnpin,
    AskWatch,
    DrainAnswer,
    EvictAnswer,
    KeptAnswer,
    MetricsAnswer,
    Request,
    ResidencyAnswer,
    StatusAnswer,
    UnpinAnswer,
)
from adapterd.gpu_cache.daemon.wire import parse_answer, request_line
from adapterd.gpu_cache.host.process.sockets import check_path, same_user
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.identity import Ref

MAX_ANSWER_BYTES = 64 << 20
"""A residency of 100,000 versions has 30 MB."""
RECEIVE_BYTES = 256 << 10
HINT = "Is the worker running, as this user, and is this its socket? Name it with --socket or ADAPTERD_CACHE_SOCKET."


class DaemonClient:
    """A connection to a worker's daemon. Opened when it is made. Not for several threads at once.

    Every method raises what the daemon refuses, SERVER_UNREACHABLE if it is not there (any more) or not in time,
    and SERVER_ERROR if it does not speak this protocol.

    Args:
        path: of the socket.
        timeout: seconds for an answer; what is waited for beside it has its own.
        ours: whether the process at the other end is to be believed; by default, one of our user.
        clock: seconds.
    """

    def __init__(
        self,
        path: Path,
        timeout: float = 10.0,
        *,
        ours: Callable[[socket.socket], bool] = same_user,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_path(path)
        self._path, self._timeout, self._clock = path, timeout, clock
        self._held = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(str(path))
            if not ours(self._socket):
                raise self._unreachable("another user's process listens there")
        except OSError as cause:
            self._socket.close()
            raise self._unreachable(_why(cause)) from cause
        except AdapterdError:
            self._socket.close()
            raise

    def status(self) -> StatusAnswer:
        return self._ask(AskStatus(), StatusAnswer)

    def prefetch(self, ref: Ref, to: Literal["vram", "host"] = "vram", wait_seconds: float = 0.0) -> KeptAnswer:
        """Begins to bring it; waits so long for it to be there, and raises why it will not come."""
        asked = AskPrefetch(ref=ref, to=to, wait_seconds=wait_seconds)
        return self._ask(asked, KeptAnswer, wait_seconds)

    def pin(self, ref: Ref, wait_seconds: float = 0.0) -> KeptAnswer:
        """As `prefetch`, and keeps it in VRAM."""
        return self._ask(AskPin(ref=ref, wait_seconds=wait_seconds), KeptAnswer, wait_seconds)

    def unpin(self, ref: Ref) -> UnpinAnswer:
        return self._ask(AskUnpin(ref=ref), UnpinAnswer)

    def evict(self, ref: Ref) -> EvictAnswer:
        """Raises Conflict, too: ADAPTER_IN_USE."""
        return self._ask(AskEvict(ref=ref), EvictAnswer)

    def drain(self, on: bool) -> DrainAnswer:
        """While on, new leases are refused."""
        return self._ask(AskDrain(on=on), DrainAnswer)

    def metrics(self) -> MetricsAnswer:
        return self._ask(AskMetrics(), MetricsAnswer)

    def residency(self, after: ResidencyAnswer | None = None) -> ResidencyAnswer:
        """All of it, or what has changed after an earlier answer."""
        feed, since = _cursor(after)
        return self._ask(AskResidency(feed=feed, since=since), ResidencyAnswer)

    def watch(self, after: ResidencyAnswer | None = None, wait_seconds: float = 30.0) -> ResidencyAnswer:
        """As `residency`, but comes when there is something to tell, or after so many seconds."""
        feed, since = _cursor(after)
        asked = AskWatch(feed=feed, since=since, wait_seconds=wait_seconds)
        return self._ask(asked, ResidencyAnswer, wait_seconds)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self.close()

    def _ask(self, request: Request, kind: type[A], wait: float = 0.0) -> A:
        until = self._clock() + self._timeout + wait
        try:
            self._hurry(until)
            self._socket.sendall(request_line(request))
        except (BrokenPipeError, ConnectionResetError):
            self._held.clear()  # hung up on; why may still be there to be read
        except OSError as cause:
            raise self._unreachable(_why(cause)) from cause
        return parse_answer(self._line(until), kind)

    def _line(self, until: float) -> bytes:
        begin = 0
        while (cut := self._held.find(b"\n", begin)) < 0:
            begin = len(self._held)
            if begin > MAX_ANSWER_BYTES:
                raise error(Code.SERVER_ERROR, str(self._path), f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            try:
                self._hurry(until)
                data = self._socket.recv(RECEIVE_BYTES)
            except OSError as cause:
                raise self._unreachable(_why(cause)) from cause
            if not data:
                raise self._unreachable("it hung up")
            self._held += data
        line = bytes(self._held[:cut])
        del self._held[: cut + 1]
        return line

    def _hurry(self, until: float) -> None:
        left = until - self._clock()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _unreachable(self, why: str) -> AdapterdError:
        return error(Code.SERVER_UNREACHABLE, str(self._path), why, HINT)


def _cursor(after: ResidencyAnswer | None) -> tuple[str | None, int | None]:
    return (None, None) if after is None else (after.feed, after.sequence)


def _why(cause: OSError) -> str:
    if isinstance(cause, FileNotFoundError | ConnectionRefusedError | NotADirectoryError):
        return "nothing listens there"
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    if isinstance(cause, BlockingIOError):
        return "too many clients wait there already"
    return (cause.strerror or str(cause)).lower()
