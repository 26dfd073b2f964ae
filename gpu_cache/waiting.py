"""Who waits for leases: how soon each looks again, and what is noticed whenever anybody looks."""

from __future__ import annotations

import time

from adapterd.gpu_cache.cache_books import CacheBooks
from adapterd.gpu_cache.records import LeaseRecord
from adapterd.loader.errors import Code, error

LOOK_SECONDS = 10e-6
"""How often one of the threads that wait for leases looks at copies, while no step runs. It sleeps as long as none can
have landed.
"""
OVERSLEPT_SECONDS = 60e-6
"""By so much sleeping takes longer than asked for (Linux: `timerslack_ns` is 50 µs)."""
WAIT_COPY_SECONDS = 0.001
"""How often the others do, and all of them while steps run, which notice copies themselves."""
WAIT_SECONDS = 0.05
"""How often it looks otherwise: a dropped lease cannot wake anybody (its finalizer may only append)."""


class Waiting(CacheBooks):
    """A room of `AdapterCache`."""

    def wait_for(self, record: LeaseRecord, timeout: float | None) -> None:
        """For `Lease.wait`: returns once the lease is ready, failed or released.

        Raises Unavailable (LEASE_TIMEOUT).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self.pump()
            with self._lock:
                if record.settled:
                    return
                left = WAIT_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise error(
                        Code.LEASE_TIMEOUT, " + ".join(str(a.ref) for a in record.asked),
                        f"still {record.state} after {timeout} s", "Wait on, or release the lease.",
                    )  # fmt: skip
                self._wait(left)

    def pump(self) -> None:
        """Notices completed copies and dropped leases, and enqueues queued copies if no step is running.

        Acquires, steps and waits do this; call it in a loop that does none of them. Never blocks.
        """
        with self._lock:
            self._notice()
        self._issue_if_idle()

    # With the lock held

    @property
    def _stepping(self) -> bool:
        """Whether a step is open, or has not executed."""
        return self._steps > 0 or not (self._last_step is None or self._last_step.done())

    @property
    def _looks_often(self) -> bool:
        """Whether who waits for a lease now is the one who looks for all."""
        return self._copies.busy and not (self._looked_at or self._stepping)

    def _patience(self) -> float:
        """Seconds until who waits for a lease looks again. One of them looks often, and wakes the rest.

        Of a long time it sleeps half only: how quick a copy can be is known from when somebody looked, so whoever
        always slept until the quickest had been noticed would never notice a quicker one.
        """
        if self._looks_often:
            left = self._copies.soonest()
            left = left / 2 if left > 2 * (LOOK_SECONDS + OVERSLEPT_SECONDS) else left
            return min(WAIT_SECONDS, max(LOOK_SECONDS, left - OVERSLEPT_SECONDS))
        return WAIT_COPY_SECONDS if self._copies.busy else WAIT_SECONDS

    def _wait(self, seconds: float) -> None:
        """Until something has happened, or may have."""
        often, patience = self._looks_often, self._patience()
        self._looked_at = self._looked_at or often
        try:
            self._lock.wait(min(seconds, patience))
        finally:
            self._looked_at = self._looked_at and not often
