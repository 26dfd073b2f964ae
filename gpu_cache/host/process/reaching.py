"""How a worker gets to a loader: over its socket, and by starting one where nobody listens."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from pathlib import Path

from adapterd.gpu_cache.host.process.link import Link, connect
from adapterd.gpu_cache.host.process.messages import Hello
from adapterd.gpu_cache.host.process.spawn import StartedLoader, Starter
from adapterd.gpu_cache.host.process.wakeup import Wakeup
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import Code, error

LAST_SECONDS = 1.0
"""For a loader that hung up to be gone, too."""


class Closing(Exception):
    """The client is being closed: whatever is waited for is given up."""


class Waiting:
    """How one thread waits, and how others end that.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._wakeup = clock, Wakeup()
        self.closing = False

    def wake(self) -> None:
        """From any thread: there is something to do."""
        self._wakeup.set()

    def end(self) -> None:
        """From any thread: every wait raises Closing from now on."""
        self.closing = True
        self._wakeup.set()

    def close(self) -> None:
        self._wakeup.close()

    def poll(self, descriptor: int | None, events: int, seconds: float | None) -> int:
        """What is ready there; 0 when the time is up or somebody woke us. Raises Closing."""
        poll = select.poll()
        poll.register(self._wakeup.descriptor, select.POLLIN)
        if descriptor is not None:
            poll.register(descriptor, events)
        ready = dict(poll.poll(None if seconds is None else seconds * 1000))
        if self._wakeup.descriptor in ready:
            self._wakeup.clear()
        if self.closing:
            raise Closing
        return 0 if descriptor is None else ready.get(descriptor, 0)

    def readable(self, peer: socket.socket, seconds: float) -> bool:
        """Whether there is something to read there before the time is up. Raises Closing."""
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            if self.poll(peer.fileno(), select.POLLIN, left):
                return True
        return False


class Reach:
    """Links to whoever serves `path`; see `client.HostClient` for the rest."""

    def __init__(self, path: Path, starter: Starter | None, *, shared: bool, waiting: Waiting) -> None:
        self._path, self._starter, self._shared, self._waiting = path, starter, shared, waiting
        self._loader: StartedLoader | None = None

    @property
    def process_id(self) -> int | None:
        """Of the loader that was started here, if that was the last one."""
        return None if self._loader is None else self._loader.process.pid

    def connect(self, hello: Callable[[], Hello], base: BaseSpec) -> Link:
        """A link. `hello` is made before a loader is started, too: it writes what such a one reads.

        Raises:
            AdapterdError: as `link.connect`; what a loader that was started says is wrong; LOADER_UNAVAILABLE.
            Closing.
        """
        link = connect(self._path, hello, base, self._waiting.readable)
        if link is None and self._starter is not None:
            self.bury(LAST_SECONDS)
            hello()
            self._loader = self._starter.start(self._waiting.readable)
            link = connect(self._path, hello, base, self._waiting.readable)
        if link is None:
            raise error(
                Code.LOADER_UNAVAILABLE, str(self._path), "no loader serves this socket",
                "Start one: python -m adapterd.gpu_cache.host.process --keep --config FILE --socket PATH.",
            )  # fmt: skip
        return link

    def end_loader(self) -> bool:
        """Ends the loader that does not answer, whoever else shares it. Whether it was started here, and was alive."""
        loader, self._loader = self._loader, None
        if loader is None:
            return False
        alive = loader.process.poll() is None
        loader.close(0, shared=False)
        return alive

    def bury(self, timeout: float) -> None:
        """Lets go of a loader that was started here. Idempotent."""
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close(timeout, shared=self._shared)
