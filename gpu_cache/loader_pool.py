"""Loader threads, shared fairly: a tenant that queues a thousand loads delays another's first one by one job."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self

from adapterd.gpu_cache.budgets import TenantBudget

_LOG = logging.getLogger(__name__)

Work = Callable[[], None]


class LoaderPool(Protocol):
    """Where loader jobs run."""

    def submit(self, tenant: str, work: Work) -> None:
        """Queues `work`; never runs it in the caller. After `close` it is dropped."""
        ...

    def close(self) -> None:
        """Drops what is queued, waits for what runs. Idempotent."""
        ...


class FairPool:
    """LoaderPool of `threads` threads: next is the tenant with the fewest running jobs, then who waited longest.

    Its lock is a leaf: nothing is called under it. It may be taken under the cache's lock, never the reverse.
    """

    def __init__(self, threads: int, max_running: Mapping[str, int | None], default_max: int | None) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, deque[Work]] = {}  # ordered: longest not served first
        self._running: Counter[str] = Counter()
        self._limits, self._default_limit = max_running, default_max
        self.closed = False
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="adapterd-loader")

    @classmethod
    def of(cls, threads: int, tenants: Mapping[str, TenantBudget], default: TenantBudget) -> Self:
        """The pool that the budgets ask for."""
        return cls(threads, {t: budget.max_loads for t, budget in tenants.items()}, default.max_loads)

    def submit(self, tenant: str, work: Work) -> None:
        with self._lock:
            if self.closed:
                return
            self._queues.setdefault(tenant, deque()).append(work)
            self._wake()

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._queues.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _wake(self) -> None:
        """One thread looks for a job. Called for each job queued, and each one ended, which may unblock another."""
        self._threads.submit(self._run_one).add_done_callback(_report)

    def _run_one(self) -> None:
        with self._lock:
            tenant = self._next_tenant()
            if tenant is None:
                return
            work = self._take(tenant)
        try:
            work()
        finally:
            with self._lock:
                self._running[tenant] -= 1
                if not self.closed and self._queues:
                    self._wake()

    def _next_tenant(self) -> str | None:
        ready = [t for t in self._queues if self._below_limit(t)]
        return min(ready, key=lambda t: self._running[t], default=None)

    def _below_limit(self, tenant: str) -> bool:
        limit = self._limits.get(tenant, self._default_limit)
        return limit is None or self._running[tenant] < limit

    def _take(self, tenant: str) -> Work:
        queue = self._queues.pop(tenant)
        work = queue.popleft()
        if queue:
            self._queues[tenant] = queue  # at the end: it was served last
        self._running[tenant] += 1
        return work


def _report(future: Future[None]) -> None:
    """A job answers its lease itself, failures included; what still comes out of it is our own bug."""
    if not future.cancelled() and (cause := future.exception()) is not None:
        _LOG.error("a loader job broke", exc_info=cause)
