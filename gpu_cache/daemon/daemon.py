"""The daemon as a worker starts it: its socket, its thread, and metrics by HTTP if asked for."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from adapterd.gpu_cache.daemon.desk import Desk
from adapterd.gpu_cache.daemon.feed import ResidencyFeed
from adapterd.gpu_cache.daemon.http import MetricsServer
from adapterd.gpu_cache.daemon.metrics import registry_of
from adapterd.gpu_cache.daemon.served import Served
from adapterd.gpu_cache.daemon.server import DaemonServer
from adapterd.gpu_cache.host.process.sockets import Listener, same_user


class Daemon:
    """Serves a cache on a Unix socket while it is entered. Nothing of it runs on the serving thread.

    The socket's folder must be the user's alone (0700); it is made if it is missing. A dead worker's socket is
    replaced. Enter it inside the cache: `with cache, Daemon(cache, path):`.
    """

    def __init__(
        self,
        cache: Served,
        path: Path,
        *,
        metrics_port: int | None = None,
        table_bytes: Callable[[], int] = lambda: 0,
        allowed: Callable[[socket.socket], bool] = same_user,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens nowhere yet.

        Args:
            path: of the socket.
            metrics_port: serve metrics by HTTP on this port of 127.0.0.1, too; 0 takes a free one.
            table_bytes: device memory of the tables of the engine over this cache, for the status.
            allowed: whether the process at the other end of a connection may ask; by default, one of our user.
            clock: seconds.
        """
        self._cache, self._path, self._metrics_port = cache, path, metrics_port
        self._table_bytes, self._allowed, self._clock = table_bytes, allowed, clock
        self._stack = ExitStack()
        self._http: MetricsServer | None = None

    @property
    def path(self) -> Path:
        return self._path

    @property
    def metrics_url(self) -> str | None:
        """Where metrics are served by HTTP, if they are."""
        return None if self._http is None else self._http.url

    def __enter__(self) -> Self:
        """Raises:
        Conflict: CONFLICT if another process serves the socket.
        Failed: SETTINGS_INVALID if others than we could come near it, or if the path is too long or taken;
            PORT_IN_USE.
        Unavailable: STORAGE_UNAVAILABLE.
        """
        registry = registry_of(self._cache)
        with ExitStack() as stack:
            listener = Listener(self._path, "daemon")
            stack.callback(listener.close)
            if self._metrics_port is not None:
                self._http = MetricsServer(registry, self._metrics_port)
                stack.callback(self._http.close)
            desk = Desk(self._cache, ResidencyFeed(secrets.token_hex(8)), registry, self._clock, self._table_bytes)
            server = DaemonServer(listener.socket, desk, allowed=self._allowed, clock=self._clock)
            thread = threading.Thread(target=server.run, name="adapterd-daemon", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self._stack.close()
        self._http = None
