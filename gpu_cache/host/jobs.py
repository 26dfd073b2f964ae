"""Loader jobs: run without the host's lock, on a loader thread, and say exactly once how they ended.

What callers are told is collected under the lock and said without it: `settle` may call the host again.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import TypeVar

from adapterd.gpu_cache.host.interface import Failure
from adapterd.gpu_cache.host.pool import LoaderPool
from adapterd.gpu_cache.host.records import Request
from adapterd.loader.errors import AdapterdError, Code, reject

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

BROKEN = Failure((reject(Code.INTERNAL, "loader", "the loader broke; the log has the traceback", "Report it."),))
"""For what is no AdapterdError: our own bug. The exception itself goes to the pool, which logs it."""


class Answers:
    """What callers are going to be told, and how many of each tenant still wait to be told."""

    def __init__(self) -> None:
        self._ready: deque[Callable[[], None]] = deque()
        self.waiting: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._ready)

    def add(self, request: Request, outcome: object) -> None:
        """With the lock. Nothing, if the request was answered or released."""
        settle = self.withdraw(request)
        if settle is not None:
            self._ready.append(partial(settle, outcome))

    def withdraw(self, request: Request) -> Callable[[object], None] | None:
        """With the lock: the request waits no longer."""
        settle, request.answer = request.answer, None
        self.waiting[request.tenant] -= settle is not None
        if not self.waiting[request.tenant]:
            del self.waiting[request.tenant]
        return settle

    def deliver(self, most: int | None = None) -> None:
        """Without the lock, from any thread: says all, or at most so many. Raises nothing but an interrupt of it."""
        said = 0
        while self._ready and said != most:
            try:
                say = self._ready.popleft()
            except IndexError:
                break
            said += 1
            try:
                say()
            except KeyboardInterrupt:  # perhaps nothing was said yet
                self._ready.appendleft(say)
                raise
            except BaseException:  # noqa: BLE001 - a caller's bug; the others are told all the same
                _LOG.exception("an answer of the host was not taken")


class Desk:
    """Has answers said by another thread: whoever made them known may hold locks that `settle` takes.

    Args:
        pool: of one thread; `close` closes it.
    """

    def __init__(self, answers: Answers, pool: LoaderPool) -> None:
        self._answers, self._pool = answers, pool
        self.closed = False

    def hand_over(self) -> None:
        """With the lock: whatever is known by now."""
        if not self._answers:
            return
        if self.closed:  # so is the pool, or will be
            threading.Thread(target=self._answers.deliver, name="adapterd-last-answers", daemon=True).start()
        else:
            self._pool.submit("", self._answers.deliver)

    def close(self, timeout: float) -> None:
        """Without the lock; `closed` was set before."""
        self.hand_over()  # what an interrupt has left unsaid
        self._pool.close(timeout)


class LoaderJobs:
    """Starts jobs in a pool.

    Args:
        pool: where they run.
        lock: taken to say how a job ended.
        answers: delivered after each job.
    """

    def __init__(self, pool: LoaderPool, lock: Lock, answers: Answers) -> None:
        self._pool, self._lock, self._answers = pool, lock, answers

    def start(
        self, tenant: str, work: Callable[[], T], end: Callable[[T | Failure], None], broken: Callable[[], None]
    ) -> None:
        """Queues `work`; `end` gets its result or Failure, with the lock held. If `end` breaks, which is our own
        bug, `broken` fails who waits for it: nobody else would tell them."""
        self._pool.submit(tenant, partial(self._run, work, end, broken))

    def _run(self, work: Callable[[], T], end: Callable[[T | Failure], None], broken: Callable[[], None]) -> None:
        outcome: T | Failure = BROKEN
        try:
            outcome = work()
        except AdapterdError as failure:
            outcome = Failure(failure.problems)
        finally:
            try:
                self._end(partial(end, outcome), broken)
            finally:
                self._answers.deliver()

    def _end(self, end: Callable[[], None], broken: Callable[[], None]) -> None:
        with self._lock:
            try:
                end()
            except BaseException:
                broken()
                raise
