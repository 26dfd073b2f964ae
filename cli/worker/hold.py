"""One request's hold on its adapter: a lease that can be paused."""

from __future__ import annotations

from adapterd.cli.worker.requests import Wish
from adapterd.gpu_cache import AdapterCache, Lease


class Hold:
    """Asks once; after a pause it takes the very same versions again.

    Args:
        cache: the worker's.
        wish, tenant: of the request.

    Attributes:
        lease: None before it asked and after it was released.
    """

    def __init__(self, cache: AdapterCache, wish: Wish, tenant: str) -> None:
        self._cache, self._wish, self._tenant = cache, wish, tenant
        self.lease: Lease | None = None

    def acquire(self) -> None:
        """Asks, or goes on after a pause. Returns at once. Raises Failed (CACHE_CLOSED)."""
        if self.lease is None:
            self.lease = self._cache.acquire(self._wish, tenant=self._tenant)
        else:
            self.lease.resume()

    def pause(self) -> None:
        """Nothing is held until the next `acquire`. Idempotent."""
        if self.lease is not None:
            self.lease.pause()

    def release(self) -> None:
        """Idempotent."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
