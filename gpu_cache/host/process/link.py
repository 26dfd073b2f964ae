"""A worker's connection to its loader: the greeting, then messages both ways. Used by one thread."""

from __future__ import annotations

import array
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from adapterd.gpu_cache.host.process.forks import keep_from_children
from adapterd.gpu_cache.host.process.frames import Frame, FrameReader, Garbled
from adapterd.gpu_cache.host.process.messages import (
    FromLoader,
    FromWorker,
    Hello,
    Refusal,
    Table,
    WantTable,
    Welcome,
    encode,
    from_loader,
)
from adapterd.gpu_cache.host.process.slab import SharedSlab
from adapterd.gpu_cache.host.process.sockets import same_user
from adapterd.gpu_cache.host.process.spawn import Readable
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code, error, error_from

GREETING_SECONDS = 60.0
"""For one answer of the greeting: the loader may still be touching its slab."""
RECEIVE_BYTES = 256 << 10
MAX_UNSENT = 1024
"""Messages."""
_INT = array.array("i").itemsize


class Link:
    """Connected and welcomed.

    Attributes:
        slab: the loader's, mapped.
        trust: digest of what the loader trusts.
    """

    def __init__(
        self, peer: socket.socket, slab: SharedSlab, trust: str, reader: FrameReader, early: Sequence[Frame]
    ) -> None:
        self.slab, self.trust = slab, trust
        self._peer, self._reader, self._early = peer, reader, early
        self._unsent: deque[memoryview] = deque()
        peer.setblocking(False)

    def fileno(self) -> int:
        return self._peer.fileno()

    @property
    def wants_to_send(self) -> bool:
        return bool(self._unsent)

    @property
    def busy(self) -> bool:
        """Enough is unsent: what comes next can wait where it is."""
        return len(self._unsent) >= MAX_UNSENT

    def send(self, message: FromWorker) -> None:
        """Queues it; `flush` sends. Raises Garbled if it is too large."""
        self._unsent.append(memoryview(encode(message)))

    def flush(self) -> None:
        """Raises OSError."""
        while self._unsent:
            try:
                sent = self._peer.send(self._unsent[0])
            except BlockingIOError:
                return
            self._unsent[0] = self._unsent[0][sent:]
            if not self._unsent[0]:
                self._unsent.popleft()

    def early(self) -> Sequence[Frame]:
        """What came right behind the welcome; to be taken first, once."""
        return self._early

    def receive(self) -> Iterator[Frame]:
        """What is there. Raises EOFError, Garbled or OSError: the link is of no use any more."""
        try:
            data = self._peer.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError("the loader has gone")
        yield from self._reader.feed(data)

    def close(self) -> None:
        self._peer.close()


def connect(path: Path, hello: Callable[[], Hello], base: BaseSpec, readable: Readable) -> Link | None:
    """A link to the loader that serves the socket; None if none does.

    Args:
        hello: made once somebody listens.
        base: the one that is named there.
        readable: how to wait.

    Raises:
        AdapterdError: the loader's refusal. Unavailable: LOADER_UNAVAILABLE if it is no loader of ours, or goes.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    keep_from_children(peer)
    greeting = _Greeting(peer, readable)
    try:
        try:
            peer.settimeout(GREETING_SECONDS)  # a full backlog makes us wait
            peer.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            peer.close()
            return None
        welcome = greeting.run(hello(), base)
        slab = SharedSlab.mapped(greeting.descriptor(), welcome.slab_bytes, welcome.page_bytes)
    except (OSError, EOFError, Garbled) as cause:
        peer.close()
        raise _unavailable(f"the greeting failed: {cause or 'the loader has gone'}") from cause
    except BaseException:
        peer.close()
        raise
    finally:
        greeting.close()
    return Link(peer, slab, welcome.trust, greeting.reader, tuple(greeting.frames))


class _Greeting:
    """From `Hello` to `Welcome`, and the descriptors that come with it."""

    def __init__(self, peer: socket.socket, readable: Readable) -> None:
        self._peer, self._readable = peer, readable
        self.reader = FrameReader()
        self.frames: deque[Frame] = deque()
        self._descriptors: list[int] = []

    def run(self, hello: Hello, base: BaseSpec) -> Welcome:
        if not same_user(self._peer):
            raise _unavailable("who serves the socket is another user")
        self._peer.sendall(encode(hello))
        while True:
            match self._next():
                case Welcome() as welcome:
                    return welcome
                case WantTable():
                    self._peer.sendall(encode(Table(table_of(base))))
                case Refusal(problems) if problems:
                    raise error_from(problems)
                case other:
                    raise Garbled(f"{type(other).__name__} is no greeting")

    def descriptor(self) -> int:
        if len(self._descriptors) != 1:
            raise Garbled(f"{len(self._descriptors)} descriptors came with the welcome")
        return self._descriptors[0]

    def close(self) -> None:
        """A mapping needs its descriptor no more."""
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _next(self) -> FromLoader:
        while not self.frames:
            if not self._readable(self._peer, GREETING_SECONDS):
                raise EOFError(f"no answer within {GREETING_SECONDS:g} seconds")
            room = socket.CMSG_SPACE(_INT)
            data, extra, _, _ = self._peer.recvmsg(RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            for level, kind, sent in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._descriptors += array.array("i", sent[: len(sent) - len(sent) % _INT])
            if not data:
                raise EOFError("the loader has gone")
            self.frames.extend(self.reader.feed(data))
        return from_loader(self.frames.popleft())


def table_of(base: BaseSpec) -> bytes:
    """As `Table` and `Rebase` carry it."""
    return json.dumps(base.as_json(), separators=(",", ":")).encode()


def _unavailable(message: str) -> AdapterdError:
    return error(Code.LOADER_UNAVAILABLE, "loader process", message)
