"""Loader jobs: run without the cache's lock, on a loader thread, and say exactly once how they ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import TypeVar

from adapterd.gpu_cache.host.pool import LoaderPool
from adapterd.loader.errors import AdapterdError, Code, Problem, error, reject

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """How a job ended, when it did not end well."""

    problems: tuple[Problem, ...]

    @property
    def cancelled(self) -> bool:
        return self.problems[0].code is Code.LEASE_CANCELLED


BROKEN = Failure((reject(Code.INTERNAL, "loader", "the loader broke; the log has the traceback", "Report it."),))
"""For what is no AdapterdError: our own bug. The exception itself goes to the pool, which logs it."""


class LoaderJobs:
    """Starts jobs in a pool.

    Args:
        pool: where they run.
        lock: taken to say how a job ended.
        after: called with the lock held after each job.
    """

    def __init__(self, pool: LoaderPool, lock: Condition, after: Callable[[], None]) -> None:
        self._pool, self._lock, self._after = pool, lock, after

    def start(self, tenant: str, work: Callable[[], T], settle: Callable[[T | Failure], None]) -> None:
        """Queues `work`; `settle` gets its result or Failure, with the lock held."""
        self._pool.submit(tenant, partial(self._run, work, settle))

    def _run(self, work: Callable[[], T], settle: Callable[[T | Failure], None]) -> None:
        outcome: T | Failure = BROKEN
        try:
            outcome = work()
        except AdapterdError as failure:
            outcome = Failure(failure.problems)
        finally:
            with self._lock:
                settle(outcome)
                self._after()


def check_wanted(wanted: bool, what: str) -> None:
    """Raises Failed (LEASE_CANCELLED), for the start of a job that may be superfluous by now."""
    if not wanted:
        raise error(Code.LEASE_CANCELLED, what, "nobody waits for it any more")
