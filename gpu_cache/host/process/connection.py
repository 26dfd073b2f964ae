"""One worker's socket at the loader: bytes in order, never waiting, and never more of them than is bounded."""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable

from adapterd.gpu_cache.host.process.frames import FrameReader, Garbled
from adapterd.gpu_cache.host.process.house import House
from adapterd.gpu_cache.host.process.session import Refused, Session

_LOG = logging.getLogger(__name__)

RECEIVE_BYTES = 256 << 10
PAUSE_BYTES = 4 << 20
"""So much unsent, and nothing more is read from this worker: it asks faster than it listens."""
MAX_UNSENT_BYTES = 64 << 20
"""So much unsent, and the worker is dropped. Every version's manifest is said once, so only one that does not read
gets there."""
STALL_SECONDS = 60.0
"""So long nothing taken of what is unsent, and it is dropped."""
HELLO_SECONDS = 30.0
"""For the beginning of the conversation."""


class Connection:
    """Runs on the serving thread, but for `send`.

    Args:
        peer: non-blocking.
        slab: the descriptor that goes with the welcome.
        wake: called by `send` when there is something to be sent.
        clock: seconds.
    """

    def __init__(
        self,
        peer: socket.socket,
        house: House,
        slab: int,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.peer, self.session = peer, Session(house, self.send)
        self._slab, self._wake, self._clock = slab, wake, clock
        self._reader = FrameReader()
        self._lock = threading.Lock()
        self._unsent: deque[tuple[memoryview, bool]] = deque()
        self._size = 0
        self._moved = clock()  # when it was last heard of, while it has to do something
        self.closed = False

    @property
    def wants_to_send(self) -> bool:
        return bool(self._unsent)

    @property
    def wants_to_receive(self) -> bool:
        return self._size < PAUSE_BYTES

    @property
    def overdue(self) -> bool:
        """Whether it has to go: it does not read, or does not say who it is."""
        waited = self._clock() - self._moved
        if self._size > MAX_UNSENT_BYTES or (self._unsent and waited > STALL_SECONDS):
            return True
        return not self.session.welcomed and waited > HELLO_SECONDS

    def send(self, data: bytes, slab: bool = False) -> None:
        """From any thread. Dropped once the connection is closed, or about to be."""
        with self._lock:
            if self.closed or self._size > MAX_UNSENT_BYTES:
                return
            if not self._unsent:
                self._moved = self._clock()
            self._unsent.append((memoryview(data), slab))
            self._size += len(data)
        self._wake()

    def receive(self) -> None:
        """Takes what is there. Raises EOFError, Garbled, Refused or OSError: the connection is to be closed."""
        try:
            data = self.peer.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError("half a message" if self._reader.unfinished else "")
        for frame in self._reader.feed(data):
            self.session.receive(frame)

    def flush(self) -> None:
        """Sends what goes without waiting. Raises OSError."""
        while self._unsent:
            data, slab = self._unsent[0]
            try:
                sent = socket.send_fds(self.peer, [data], [self._slab]) if slab else self.peer.send(data)
            except BlockingIOError:
                return
            with self._lock:
                self._moved = self._clock()
                self._size -= sent
                if sent == len(data):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = (data[sent:], False)

    def close(self, why: BaseException | str) -> None:
        """Gives back everything that the worker had. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if isinstance(why, Garbled | Refused) or (isinstance(why, str) and why):
            _LOG.warning("a worker was hung up on: %s", why)
        else:
            _LOG.info("a worker left%s", f": {why}" if str(why) else "")
        if isinstance(why, Refused):
            self._say_at_last()
        self.session.close()
        with self._lock:
            self._unsent.clear()
        self.peer.close()

    def _say_at_last(self) -> None:
        try:
            self.flush()
        except OSError:
            _LOG.info("it did not hear why")
