"""The same work for every index, on a few threads: for hashing, reading and copying, which let other threads run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

MOST_THREADS = 8
"""By default; one core hashes about 1.3 GB/s, and eight keep up with a fast disk."""


def default_threads() -> int:
    """Processors that this process may use, `MOST_THREADS` at most."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, mine)


def for_each(count: int, work: Callable[[int], None], threads: int) -> None:
    """`work(0)` to `work(count - 1)`, begun in this order, at most `threads` at once; the caller's is one of them.

    After the first that raises none is begun. All that were begun have ended when this returns or raises.

    Raises:
        What `work` raised; for the lowest index if several did.
    """
    run = _Run(count, work)
    helpers = [threading.Thread(target=run.go, name="adapterd-each") for _ in range(min(threads, count) - 1)]
    for thread in helpers:
        thread.start()
    run.go()
    for thread in helpers:
        thread.join()
    if run.raised:
        raise run.raised[min(run.raised)]


class _Run:
    def __init__(self, count: int, work: Callable[[int], None]) -> None:
        self._count, self._work = count, work
        self._next, self._lock = 0, threading.Lock()
        self.raised: dict[int, BaseException] = {}

    def go(self) -> None:
        """Does what nobody has begun, until nothing is left or something failed."""
        while (index := self._take()) is not None:
            try:
                self._work(index)
            except BaseException as failure:  # noqa: BLE001 - raised again by for_each, in the caller's thread
                self.raised[index] = failure

    def _take(self) -> int | None:
        with self._lock:
            if self.raised or self._next == self._count:
                return None
            self._next += 1
            return self._next - 1
