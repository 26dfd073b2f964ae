"""Hashing and measuring beside each other: both are the work of C code that lets other threads run."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

MAX_THREADS = 4
"""Hashing keeps one of them busy; reading and summing hardly gain from more than three."""

WORTH_A_THREAD = 8 << 20
"""Bytes: less is done before a thread has started."""


class Crew:
    """A context manager that runs calls, in the order given, on a few threads; few bytes on none.

    At its end what has not begun is dropped, and what has begun is waited for: nothing reads a file afterwards.
    """

    def __init__(self, nbytes: int) -> None:
        threads = min(MAX_THREADS, _processors())
        alone = threads == 1 or nbytes < WORTH_A_THREAD
        self.threads = 1 if alone else threads
        self._pool = None if alone else ThreadPoolExecutor(threads, thread_name_prefix="adapterd-examine")

    def call(self, work: Callable[[], T]) -> Callable[[], T]:
        """Have `work` done; the answer waits for its value, or raises what it raised."""
        if self._pool is None:
            return work  # when it is asked for, so that a refusal before saves it
        future: Future[T] = self._pool.submit(work)
        return future.result

    def together(self, work: Callable[[], None]) -> None:
        """`work` on every thread at once, or here where there is none; returns when all have returned.

        Raises what one of them raised.
        """
        for wait in [self.call(work) for _ in range(self.threads)]:
            wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _processors() -> int:
    """Those that this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
