"""One client's socket at the daemon: one request at a time, never waiting, and never more bytes than is bounded."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from adapterd.gpu_cache.daemon.desk import Desk, Waiting
from adapterd.gpu_cache.daemon.messages import (
    MAX_LINE_BYTES,
    Answer,
)
from adapterd.gpu_cache.daemon.wire import answer_line, parse_request, refusal_line
from adapterd.loader.errors import AdapterdError, Code, Problem, reject

_LOG = logging.getLogger(__name__)

HELD_BYTES = 2 * MAX_LINE_BYTES
"""So much is read ahead."""
LINE_SECONDS = 10.0
"""From the first byte of a request to its last."""
SEND_SECONDS = 30.0
"""For one answer to be taken."""
IDLE_SECONDS = 120.0
"""Without a request."""
MAX_MISTAKES = 8
"""So many requests in a row that are not understood, and it is hung up on."""


class Connection:
    """Runs on the daemon's thread.

    Args:
        peer: non-blocking.
        clock: seconds.
    """

    def __init__(self, peer: socket.socket, desk: Desk, clock: Callable[[], float]) -> None:
        self.peer = peer
        self._desk, self._clock = desk, clock
        self._held = bytearray()
        self._unsent = memoryview(b"")
        self._waiting: Waiting | None = None
        self._mistakes = 0
        self._since = clock()  # of what it is doing: being idle, sending a line, taking an answer
        self._ends = False

    @property
    def waits(self) -> bool:
        """Whether it has asked for something that is not due yet."""
        return self._waiting is not None

    @property
    def asks(self) -> bool:
        """Whether `serve` has something to do."""
        return not (self.waits or self._unsent or self._ends) and (self._whole or len(self._held) > MAX_LINE_BYTES)

    @property
    def done(self) -> bool:
        """Whether all is said, and it is to be hung up on."""
        return self._ends and not self._unsent

    @property
    def wants_to_send(self) -> bool:
        return bool(self._unsent)

    @property
    def wants_to_receive(self) -> bool:
        return not self._ends and len(self._held) < HELD_BYTES

    @property
    def overdue(self) -> str:
        """Why it has to go, or nothing."""
        doing = self._clock() - self._since
        if self._unsent:
            return "it does not read its answer" if doing > SEND_SECONDS else ""
        if self.waits or self.asks:
            return ""
        if self._held:
            return "it does not finish its request" if doing > LINE_SECONDS else ""
        return "it asks nothing" if doing > IDLE_SECONDS else ""

    def receive(self) -> None:
        """Takes what is there. Raises EOFError or OSError: the connection is to be closed."""
        try:
            data = self.peer.recv(HELD_BYTES - len(self._held))
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        if not self._held:
            self._since = self._clock()
        self._held += data

    def serve(self) -> None:
        """Answers the next request, or begins to wait for its answer."""
        cut = self._held.find(b"\n", 0, MAX_LINE_BYTES + 1)
        if cut < 0:
            self._say(refusal_line((_too_long(),)))
            self._ends = True
            return
        line = bytes(self._held[:cut])
        del self._held[: cut + 1]
        self._answer(line)

    def look(self) -> None:
        """Says what it waits for, if that is due."""
        if (waiting := self._waiting) is not None:
            self._tell(self._outcome(lambda: self._desk.due(waiting) or waiting))

    def flush(self) -> None:
        """Sends what goes without waiting. Raises OSError."""
        if self._unsent:
            try:
                self._unsent = self._unsent[self.peer.send(self._unsent) :]
            except BlockingIOError:
                return
            if not self._unsent:
                self._since = self._clock()

    def close(self) -> None:
        self._unsent, self._waiting = memoryview(b""), None
        self.peer.close()

    @property
    def _whole(self) -> bool:
        return b"\n" in self._held

    def _answer(self, line: bytes) -> None:
        try:
            request = parse_request(line)
        except AdapterdError as mistake:
            self._mistakes += 1
            self._ends = self._mistakes >= MAX_MISTAKES
            self._say(refusal_line(mistake.problems))
            return
        self._mistakes = 0
        self._tell(self._outcome(lambda: self._desk.answer(request)))

    def _tell(self, outcome: bytes | Waiting) -> None:
        if isinstance(outcome, Waiting):
            self._waiting = outcome
        else:
            self._waiting = None
            self._say(outcome)

    @staticmethod
    def _outcome(ask: Callable[[], Answer | Waiting]) -> bytes | Waiting:
        try:
            answer = ask()
            return answer if isinstance(answer, Waiting) else answer_line(answer)
        except AdapterdError as refusal:
            return refusal_line(refusal.problems)
        except Exception:  # noqa: BLE001 - our own bug; the daemon goes on
            _LOG.exception("a request broke the daemon's own code")
            return refusal_line((reject(Code.INTERNAL, "daemon", "the daemon's own code failed", "See its log."),))

    def _say(self, line: bytes) -> None:
        self._unsent, self._since = memoryview(line), self._clock()


def _too_long() -> Problem:
    return reject(Code.REQUEST_INVALID, "request", f"longer than {MAX_LINE_BYTES} bytes", "See docs/cache.md.")
