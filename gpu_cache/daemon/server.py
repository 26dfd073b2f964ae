"""The daemon at work: one thread serves all clients and never waits for one of them."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable

from adapterd.gpu_cache.daemon.connection import Connection
from adapterd.gpu_cache.daemon.desk import Desk
from adapterd.gpu_cache.daemon.pace import Pace
from adapterd.gpu_cache.daemon.wire import refusal_line
from adapterd.gpu_cache.host.process.forks import keep_from_children
from adapterd.gpu_cache.host.process.wakeup import Wakeup
from adapterd.loader.errors import Code, reject

_LOG = logging.getLogger(__name__)

MAX_CLIENTS = 64
ACCEPTS_A_TURN = 64
LOOK_SECONDS = 0.25
"""How often the cache is looked at while somebody waits for something to happen."""
TICK_SECONDS = 1.0
"""How often clients that are stuck are looked for."""


class DaemonServer:
    """Serves until it is told to end.

    Args:
        listener: non-blocking, listening.
        allowed: whether whoever is at the other end may ask at all.
        clock: seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        desk: Desk,
        *,
        allowed: Callable[[socket.socket], bool],
        clock: Callable[[], float],
    ) -> None:
        self._listener, self._desk, self._allowed, self._clock = listener, desk, allowed, clock
        self._pace = Pace(clock)
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._clients: dict[socket.socket, Connection] = {}
        self._looked = clock()
        self._listens_from = clock()
        self._ending = threading.Event()
        self._selector.register(self._wakeup.descriptor, selectors.EVENT_READ)

    @property
    def clients(self) -> int:
        return len(self._clients)

    def end(self) -> None:
        """From any thread."""
        self._ending.set()
        self._wakeup.set()

    def run(self) -> None:
        """Returns when it has ended; all clients are hung up on then."""
        try:
            while not self._ending.is_set():
                self.turn(self._pause)
        finally:
            for client in list(self._clients.values()):
                self._drop(client, "the daemon ends")
            self._selector.close()
            self._wakeup.close()

    def turn(self, seconds: float | None) -> None:
        """Waits so long for somebody to say something, and does what is due."""
        self._want(self._listener, self._clock() >= self._listens_from, False)
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, Connection) and events & selectors.EVENT_READ:
                self._hear(key.data)
        self._wakeup.clear()
        self._look()
        self._serve()
        for client in list(self._clients.values()):
            self._attend(client)

    @property
    def _pause(self) -> float | None:
        clients = self._clients.values()
        if any(client.asks for client in clients):
            return self._pace.pause
        if any(client.waits for client in clients):
            return LOOK_SECONDS
        return TICK_SECONDS if clients or self._clock() < self._listens_from else None

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:  # no descriptors left: it would be said again at once, and again
                _LOG.error("a client could not be accepted: %s", e)
                self._listens_from = self._clock() + TICK_SECONDS
                return
            peer.setblocking(False)
            self._welcome(peer)

    def _welcome(self, peer: socket.socket) -> None:
        if not self._allowed(peer):
            _LOG.warning("another user's process was turned away")
            peer.close()
        elif len(self._clients) >= MAX_CLIENTS:
            _turn_away(peer)
        else:
            keep_from_children(peer)
            self._clients[peer] = Connection(peer, self._desk, self._clock)

    def _hear(self, client: Connection) -> None:
        try:
            client.receive()
        except EOFError:
            self._drop(client, "")
        except OSError as e:
            self._drop(client, str(e))

    def _look(self) -> None:
        """For those who wait; no oftener than they were promised, whoever asks what meanwhile."""
        waiting = [client for client in self._clients.values() if client.waits]
        if waiting and self._clock() - self._looked >= LOOK_SECONDS:
            self._looked = self._clock()
            try:
                self._desk.peek()
            except Exception:  # noqa: BLE001 - our own bug; the daemon goes on
                _LOG.exception("a look at the residency failed")
        for client in waiting:
            client.look()

    def _serve(self) -> None:
        """One request a client and turn; those who were served stand behind the others."""
        for client in [client for client in self._clients.values() if client.asks]:
            if self._pace.pause:
                return
            self._pace.take()
            client.serve()
            self._clients[client.peer] = self._clients.pop(client.peer)

    def _attend(self, client: Connection) -> None:
        try:
            client.flush()
        except OSError as e:
            self._drop(client, str(e))
            return
        if client.done or client.overdue:
            self._drop(client, client.overdue or "too many mistakes")
            return
        self._want(client.peer, client.wants_to_receive, client.wants_to_send, client)

    def _want(self, peer: socket.socket, read: bool, write: bool, client: Connection | None = None) -> None:
        """What to be woken for; nothing at all while somebody has said more than is answered yet."""
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        known = self._selector.get_map().get(peer)
        if known is None and events:
            self._selector.register(peer, events, client)
        elif known is not None and not events:
            self._selector.unregister(peer)
        elif known is not None and known.events != events:
            self._selector.modify(peer, events, client)

    def _drop(self, client: Connection, why: str) -> None:
        if why:
            _LOG.info("a client was hung up on: %s", why)
        del self._clients[client.peer]
        self._want(client.peer, False, False)
        client.close()


def _turn_away(peer: socket.socket) -> None:
    problem = reject(Code.QUEUE_FULL, "daemon", f"{MAX_CLIENTS} clients are served already", "Ask again later.")
    try:
        peer.send(refusal_line((problem,)))
    except OSError as e:
        _LOG.info("a client did not hear that it was one too many: %s", e)
    peer.close()
