"""Loader threads, shared fairly: a tenant that queues a thousand loads delays another's first one by one job."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Protocol, Self

from adapterd.gpu_cache.budgets import TenantBudget

_LOG = logging.getLogger(__name__)

Work = Callable[[], None]


class LoaderPool(Protocol):
    """Where loader jobs run."""

    def submit(self, tenant: str, work: Work) -> None:
        """Queues `work`; never runs it in the caller. After `close` it is dropped."""
        ...

    def close(self, timeout: float) -> None:
        """Drops what is queued, waits for what runs, `timeout` seconds at most. Idempotent."""
        ...


class FairPool:
    """LoaderPool of `threads` threads: next is the tenant with the fewest running jobs, then who waited longest.

    Tenants with a guaranteed share find a free thread for their first job: as long as one of them runs nothing, a
    thread is kept free for it (for each of them, but never all threads). So a tenant whose source hangs cannot
    take them all.

    Its lock is a leaf: nothing is called under it. It may be taken under the cache's lock, never the reverse.
    The threads are daemons: a job that hangs in a source or a disk keeps neither `close` nor the process.
    """

    def __init__(
        self,
        threads: int,
        max_running: Mapping[str, int | None],
        default_max: int | None,
        guaranteed: frozenset[str] = frozenset(),
        name: str = "loader",
    ) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._queues: dict[str, deque[Work]] = {}  # ordered: longest not served first
        self._running: Counter[str] = Counter()
        self._limits, self._default_limit, self._guaranteed = max_running, default_max, guaranteed
        self.closed = False
        self._most = threads
        self._threads: list[threading.Thread] = []

    @classmethod
    def of(cls, threads: int, tenants: Mapping[str, TenantBudget], default: TenantBudget) -> Self:
        """The pool that the budgets ask for."""
        shares = frozenset(tenant for tenant, budget in tenants.items() if budget.has_share)
        return cls(threads, {t: budget.max_loads for t, budget in tenants.items()}, default.max_loads, shares)

    def submit(self, tenant: str, work: Work) -> None:
        with self._changed:
            if self.closed:
                return
            self._queues.setdefault(tenant, deque()).append(work)
            if len(self._threads) < self._most:
                self._start_one()
            self._changed.notify()

    def close(self, timeout: float) -> None:
        with self._changed:
            self.closed = True
            self._queues.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := sum(thread.is_alive() for thread in self._threads):
            _LOG.warning("%d loader jobs still run after %g s; each ends with the call that it hangs in", left, timeout)

    def _start_one(self) -> None:
        name = f"adapterd-{self._name}-{len(self._threads)}"
        self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
        self._threads[-1].start()

    def _work(self) -> None:
        """A thread's life: one job after the other."""
        while (job := self._wait_for_job()) is not None:
            tenant, work = job
            try:
                work()
            except BaseException:  # noqa: BLE001 - a job answers its lease itself; what comes out is our own bug
                _LOG.exception("a loader job broke")
            finally:
                with self._changed:
                    self._running[tenant] -= 1
                    if not self._running[tenant]:
                        del self._running[tenant]
                    self._changed.notify()  # a job of this tenant may have waited for that

    def _wait_for_job(self) -> tuple[str, Work] | None:
        """None once the pool is closed."""
        with self._changed:
            while not self.closed:
                tenant = self._next_tenant()
                if tenant is not None:
                    return tenant, self._take(tenant)
                self._changed.wait()
            return None

    def _next_tenant(self) -> str | None:
        ready = [t for t in self._queues if self._below_limit(t) and self._leaves_reserve(t)]
        return min(ready, key=lambda t: self._running[t], default=None)

    def _below_limit(self, tenant: str) -> bool:
        limit = self._limits.get(tenant, self._default_limit)
        return limit is None or self._running[tenant] < limit

    def _leaves_reserve(self, tenant: str) -> bool:
        if tenant in self._guaranteed and not self._running[tenant]:
            return True
        owed = sum(not self._running[other] for other in self._guaranteed if other != tenant)
        return self._running.total() < self._most - min(owed, self._most - 1)

    def _take(self, tenant: str) -> Work:
        queue = self._queues.pop(tenant)
        work = queue.popleft()
        if queue:
            self._queues[tenant] = queue  # at the end: it was served last
        self._running[tenant] += 1
        return work
