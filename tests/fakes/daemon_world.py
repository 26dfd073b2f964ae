"""The daemon's server without its thread: it takes a turn when the test says so, on a clock of the test's."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from adapterd.gpu_cache.daemon.desk import Desk
from adapterd.gpu_cache.daemon.feed import ResidencyFeed
from adapterd.gpu_cache.daemon.metrics import registry_of
from adapterd.gpu_cache.daemon.served import Served
from adapterd.gpu_cache.daemon.server import DaemonServer
from adapterd.gpu_cache.host.process.sockets import Listener, same_user

from .served import FakeServed

FEED = "feed-of-a-test"


class DaemonWorld:
    """A server over a fake cache, or over the one that is `serving`, and sockets to it."""

    def __init__(
        self,
        folder: Path,
        *,
        serving: Served | None = None,
        allowed: Callable[[socket.socket], bool] = same_user,
        listening: Callable[[socket.socket], Any] = lambda listening: listening,
    ) -> None:
        self.now = 1000.0
        self.cache = FakeServed()
        self.path = folder / "s"
        self._listener = Listener(self.path, "daemon")
        served = serving or self.cache
        desk = Desk(served, ResidencyFeed(FEED), registry_of(served), self._clock)
        listener = listening(self._listener.socket)
        self.server = DaemonServer(listener, desk, allowed=allowed, clock=self._clock)
        self._sockets: list[socket.socket] = []

    def _clock(self) -> float:
        return self.now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self.server.end()
        self.server.run()
        assert self.server.clients == 0
        self._listener.close()
        for each in self._sockets:
            each.close()

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.server.turn(0)

    def caller(self) -> Caller:
        """A client that is connected, and known to the server if it takes one more."""
        made = socket.socket(socket.AF_UNIX)
        made.setblocking(False)
        self._sockets.append(made)
        made.connect(str(self.path))
        self.turn()
        return Caller(self, made)


class Caller:
    """A socket whose bytes the test chooses."""

    def __init__(self, world: DaemonWorld, made: socket.socket) -> None:
        self.world, self.socket = world, made
        self._held = b""

    def say(self, data: bytes | dict[str, Any]) -> None:
        """All of it, if the daemon takes it; what is too much for it is not sent."""
        data = data if isinstance(data, bytes) else json.dumps({"protocol": 1, **data}).encode() + b"\n"
        while data:
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError:
                self.world.turn()
                return
            except ConnectionError:
                return
            self.world.turn()

    def hear(self) -> list[dict[str, Any]]:
        """What was answered by now."""
        for _ in range(3):
            self.world.turn()
            try:
                while data := self.socket.recv(1 << 16):
                    self._held += data
            except (BlockingIOError, ConnectionError):
                continue
        *lines, self._held = self._held.split(b"\n")
        return [json.loads(line) for line in lines]

    def ask(self, request: str, **fields: Any) -> dict[str, Any]:
        self.say({"request": request, **fields})
        (answer,) = self.hear()
        return answer

    def codes(self) -> list[str]:
        return [problem["code"] for answer in self.hear() for problem in answer.get("problems", ())]

    @property
    def hung_up(self) -> bool:
        self.world.turn()
        try:
            while self.socket.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        return True
