"""The loader process at work: one thread serves all sockets and never waits for a worker, the host's threads load."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial

from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import HostUsage, Progress
from adapterd.gpu_cache.host.process.connection import Connection
from adapterd.gpu_cache.host.process.facts import loading_to_bytes, usage_to_bytes
from adapterd.gpu_cache.host.process.frames import Garbled
from adapterd.gpu_cache.host.process.house import House
from adapterd.gpu_cache.host.process.messages import FromLoader, Loading, TrustChanged, Usage
from adapterd.gpu_cache.host.process.session import Refused
from adapterd.gpu_cache.host.process.sockets import same_user
from adapterd.gpu_cache.host.process.wakeup import Wakeup
from adapterd.loader.identity import VersionKey

_LOG = logging.getLogger(__name__)

MAX_WORKERS = 256
TICK_SECONDS = 1.0
"""How often stalled workers are looked for, and the usage is told at most."""


class LoaderServer:
    """Serves until it is told to end, or until nobody wants it any more.

    Args:
        listener: non-blocking, listening.
        house: what sessions share.
        slab: descriptor.
        host: None while there is none yet.
        starter: a socket whose other end belongs to who started this loader, or None.
        keep: stays when starter and workers are gone.
        clock: seconds.
        usage_seconds: how often the usage is told, at most.
    """

    def __init__(
        self,
        listener: socket.socket,
        house: House,
        slab: int,
        host: Callable[[], HostCache | None],
        *,
        starter: socket.socket | None,
        keep: bool,
        clock: Callable[[], float],
        usage_seconds: float = TICK_SECONDS,
    ) -> None:
        self._listener, self._house, self._slab, self._host = listener, house, slab, host
        self._starter, self._keep, self._clock = starter, keep, clock
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._workers: dict[int, Connection] = {}
        self._ending = threading.Event()
        self._reread = threading.Event()
        self._had_worker = starter is not None
        self._told: HostUsage | None = None
        self._told_loading: Mapping[VersionKey, Progress] = {}
        self._told_trust = house.watch.store.changes
        self._usage_seconds, self._usage_told = usage_seconds, clock()
        self._deaf_until: float | None = None  # nobody can be accepted until then

    # --- from signal handlers

    def end(self) -> None:
        self._ending.set()
        self._wakeup.set()

    def reread_trust(self) -> None:
        self._reread.set()
        self._wakeup.set()

    # --- the serving thread

    def run(self) -> None:
        """Returns when it has ended; all workers are hung up on then."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakeup.descriptor, selectors.EVENT_READ, self._wakeup.clear)
        if self._starter is not None:
            self._selector.register(self._starter, selectors.EVENT_READ, self._starter_spoke)
        try:
            while not (self._ending.is_set() or self._unwanted()):
                for key, _ in self._selector.select(self._pause):
                    key.data()
                self._look_after()
        finally:
            for worker in list(self._workers.values()):
                self._drop(worker, "the loader ends")
            self._selector.close()
            self._wakeup.close()

    @property
    def _pause(self) -> float | None:
        return TICK_SECONDS if self._workers or self._deaf_until is not None else None

    def _unwanted(self) -> bool:
        return not (self._keep or self._starter or self._workers) and self._had_worker

    def _look_after(self) -> None:
        """What is due after every round: all that is to be sent, and once in a while those who are stuck."""
        if self._reread.is_set():
            self._reread.clear()
            self._house.watch.read()
        self._tell_trust()
        now = self._clock()
        if self._deaf_until is not None and now >= self._deaf_until:
            self._deaf_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if now - self._usage_told >= self._usage_seconds:
            self._usage_told = now
            host = self._host()
            if host is not None:
                self._tell_usage(host.usage())
                self._tell_loading(host.loading())
        for worker in list(self._workers.values()):
            self._attend(worker)

    def _attend(self, worker: Connection) -> None:
        try:
            worker.flush()
        except OSError as e:
            self._drop(worker, e)
            return
        if worker.overdue:
            self._drop(worker, "it does not read what it is told, or does not say who it is")
            return
        events = selectors.EVENT_READ if worker.wants_to_receive else 0
        events |= selectors.EVENT_WRITE if worker.wants_to_send else 0
        if self._selector.get_key(worker.peer).events != events:
            self._selector.modify(worker.peer, events, partial(self._hear, worker))

    def _hear(self, worker: Connection) -> None:
        if worker.closed:
            return
        try:
            if worker.wants_to_receive:
                self._house.watch.look()
                worker.receive()
        except (EOFError, OSError, Garbled, Refused) as e:
            self._drop(worker, e)
        except Exception as e:  # noqa: BLE001 - our own bug; the loader goes on for the others
            _LOG.exception("a worker's message broke the loader's own code")
            self._drop(worker, e)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except BlockingIOError:
            return  # it is gone already
        except OSError as e:  # no descriptors left: it would be said again at once, and again
            _LOG.error("a worker could not be accepted: %s", e)
            self._selector.unregister(self._listener)
            self._deaf_until = self._clock() + TICK_SECONDS
            return
        peer.setblocking(False)
        if len(self._workers) >= MAX_WORKERS or not same_user(peer):
            _LOG.warning("a stranger, or one worker too many, was turned away")
            peer.close()
            return
        worker = Connection(peer, self._house, self._slab, self._wakeup.set, self._clock)
        self._workers[peer.fileno()] = worker
        self._had_worker, self._told = True, None
        self._selector.register(peer, selectors.EVENT_READ, partial(self._hear, worker))

    def _drop(self, worker: Connection, why: BaseException | str) -> None:
        if self._workers.pop(worker.peer.fileno(), None) is not None:
            self._selector.unregister(worker.peer)
            worker.close(why)

    def _starter_spoke(self) -> None:
        """It never says anything: its end is closed, by itself or by its death."""
        assert self._starter is not None
        self._selector.unregister(self._starter)
        self._starter.close()
        self._starter = None

    # --- what everybody is told

    def _tell_trust(self) -> None:
        changes = self._house.watch.store.changes
        if changes != self._told_trust:
            self._told_trust = changes
            _LOG.info("trust has changed")
            self._tell_all(TrustChanged(self._house.trust))

    def _tell_usage(self, usage: HostUsage) -> None:
        if usage != self._told:
            self._told = usage
            self._tell_all(Usage(usage_to_bytes(usage)))

    def _tell_loading(self, loading: Mapping[VersionKey, Progress]) -> None:
        if loading != self._told_loading:
            self._told_loading = loading
            self._tell_all(Loading(loading_to_bytes(loading)))

    def _tell_all(self, message: FromLoader) -> None:
        for worker in self._workers.values():
            if worker.session.welcomed:
                worker.session.tell(message)
