"""The same work for every index, on a few threads: for hashing, reading and copying, which let other threads run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Self

MOST_THREADS = 8
"""By default; one core hashes about 1.3 GB/s, and eight keep up with a fast disk."""


def default_threads() -> int:
    """Processors that this process may use, `MOST_THREADS` at most."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, mine)


def for_each(count: int, work: Callable[[int], None], threads: int, helpers: Helpers | None = None) -> None:
    """`work(0)` to `work(count - 1)`, begun in this order, at most `threads` at once; the caller's is one of them.

    After the first that raises none is begun. All that were begun have ended when this returns or raises.

    Args:
        helpers: the other threads, as many as are free; None: threads that are started for this.

    Raises:
        What `work` raised; for the lowest index if several did.
    """
    run, others = _Run(count, work), min(threads, count) - 1
    with nullcontext(helpers) if helpers is not None else Helpers(others) as crew:
        try:
            crew.help(run, others)
            run.go()
        finally:
            run.end()
    if run.raised:
        raise run.failure()


class Helpers:
    """Threads for `for_each` that are kept between calls: starting seven takes as long as hashing a MiB.

    Calls share them: each thread helps the call that asked first. A context manager; `close` ends them.

    Args:
        most: threads; started when there is work for them.
    """

    def __init__(self, most: int) -> None:
        self._most, self._closed = most, False
        self._asked: SimpleQueue[_Run | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def help(self, run: _Run, wanted: int) -> None:
        """Have `wanted` threads go, or as many as there are. Nobody comes once it is closed."""
        with self._lock:
            wanted = 0 if self._closed else min(wanted, self._most)
            with suppress(RuntimeError):  # the system gives no thread: the caller gets on with fewer
                while len(self._threads) < wanted:
                    self._start()
            wanted = min(wanted, len(self._threads))
        for _ in range(wanted):
            self._asked.put(run)

    def close(self, timeout: float | None = None) -> None:
        """Waits for what they are at, `timeout` seconds for each at most. Idempotent."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._asked.put(None)
        for thread in threads:
            thread.join(timeout)

    def _start(self) -> None:
        """Only one that runs is in the list, for `close` to wait for."""
        thread = threading.Thread(target=self._work, name="adapterd-each", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _work(self) -> None:
        while (run := self._asked.get()) is not None:
            run.join()
            del run  # what it was about is not kept while nothing is asked

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Run:
    """One call of `for_each`."""

    def __init__(self, count: int, work: Callable[[int], None]) -> None:
        self._count, self._work = count, work
        self._next = self._inside = 0
        self._changed = threading.Condition()
        self.raised: dict[int, BaseException] = {}

    def go(self) -> None:
        """Does what nobody has begun, until nothing is left or something failed."""
        while (index := self._take()) is not None:
            try:
                self._work(index)
            except BaseException as failure:  # noqa: BLE001 - raised again by for_each, in the caller's thread
                self.raised[index] = failure

    def join(self) -> None:
        """`go`, in a thread that the caller waits for; who comes too late finds nothing left."""
        with self._changed:
            self._inside += 1
        self.go()
        with self._changed:
            self._inside -= 1
            self._changed.notify()

    def end(self) -> None:
        """Nothing more is begun, and who is at something is waited for."""
        with self._changed:
            self._next = self._count
            while self._inside:
                self._changed.wait()
        self._work = _nothing  # a helper that is held up elsewhere may look at this run much later

    def failure(self) -> BaseException:
        """What is to be raised, once: who still has the run does not keep it, and what its traceback holds."""
        raised, self.raised = self.raised, {}
        return raised[min(raised)]

    def _take(self) -> int | None:
        with self._changed:
            if self.raised or self._next == self._count:
                return None
            self._next += 1
            return self._next - 1


def _nothing(_: int) -> None:
    """What is left of a run that is over."""
