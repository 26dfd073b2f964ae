"""Lines from a file descriptor on a thread that can be ended, whatever the other side does."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from threading import Thread
from types import TracebackType
from typing import Self

from adapterd.cli.worker.lines import MAX_LINE_BYTES

CHUNK = 1 << 16


class LineReader:
    """Calls `on_line(number, line)` for each line, and `on_end()` once after the last one; on its own thread.

    A line over the limit is given as None and its rest is thrown away, so that no client can fill the memory.
    """

    def __init__(
        self, descriptor: int, on_line: Callable[[int, bytes | None], None], on_end: Callable[[], None]
    ) -> None:
        self._descriptor, self._on_line, self._on_end = descriptor, on_line, on_end
        self._wake, self._waker = os.pipe()
        self._thread = Thread(target=self._run, name="adapterd-worker-lines", daemon=True)
        self._number = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        os.write(self._waker, b"x")
        self._thread.join()
        os.close(self._wake)
        os.close(self._waker)

    def _run(self) -> None:
        try:
            self._read_all()
        finally:
            self._on_end()

    def _read_all(self) -> None:
        kept, skipping = b"", False
        while data := self._read():
            *lines, kept = (kept + data).split(b"\n")
            for line in lines:
                if skipping:
                    skipping = False
                else:
                    self._tell(line)
            if len(kept) > MAX_LINE_BYTES:
                if not skipping:
                    self._tell(kept)
                kept, skipping = b"", True
        if kept and not skipping:
            self._tell(kept)

    def _tell(self, line: bytes) -> None:
        self._number += 1
        if len(line) > MAX_LINE_BYTES:
            self._on_line(self._number, None)
        elif line.strip():
            self._on_line(self._number, line)

    def _read(self) -> bytes:
        """The next bytes; none at the end, and when the reader is to stop."""
        poll = select.poll()  # `select` takes no descriptors above 1023
        for descriptor in (self._descriptor, self._wake):
            poll.register(descriptor, select.POLLIN)
        if any(descriptor == self._wake for descriptor, _ in poll.poll()):
            return b""
        try:
            return os.read(self._descriptor, CHUNK)
        except OSError:
            return b""  # a terminal that went away
