"""A descriptor that makes a `select` return, whoever wants it to."""

from __future__ import annotations

import os
from threading import RLock


class Wakeup:
    """`set` may be called from any thread and, since the lock is reentrant, from a signal handler."""

    def __init__(self) -> None:
        self._lock = RLock()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True

    def set(self) -> None:
        """Does nothing once it is closed: the number may be another file's by then."""
        with self._lock:
            if self._open:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.descriptor)
