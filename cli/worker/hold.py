"""One request's hold on its adapter: a lease that can be given back for a while."""

from __future__ import annotations

from dataclasses import replace

from adapterd.cli.worker.requests import Wish
from adapterd.gpu_cache import AdapterCache, Lease
from adapterd.loader.errors import Code, error
from adapterd.loader.identity import Ref


class Hold:
    """Asks, gives back, asks again for the very same versions; `lease` is None in between.

    Args:
        cache: the worker's.
        wish, tenant: of the request.
    """

    def __init__(self, cache: AdapterCache, wish: Wish, tenant: str) -> None:
        self._cache, self._wish, self._tenant = cache, wish, tenant
        self._key: bytes | None = None
        self.lease: Lease | None = None

    def acquire(self) -> None:
        """Returns at once. Raises Failed (CACHE_CLOSED)."""
        assert self.lease is None
        self.lease = self._cache.acquire(self._wish, tenant=self._tenant)

    def settle(self) -> bytes:
        """The lease is ready: its prefix key, which stays the same for the request's life.

        Raises:
            AdapterdError: the lease's failure; CONFLICT if the names mean other versions than before a pause.
        """
        assert self.lease is not None
        key = self.lease.prefix_key()
        if self._key not in (None, key):
            raise error(
                Code.CONFLICT, "composition", "an alias of it was moved while the request was paused",
                "Name versions by @sha256:…, or ask again.",
            )  # fmt: skip
        self._key = key
        self._wish = _pinned(self._wish, self.lease)
        return key

    def release(self) -> None:
        """Idempotent."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()


def _pinned(wish: Wish, lease: Lease) -> Wish:
    """The same wish by digest. A lease does not say which of several names became which version: those stay."""
    parts = ((wish, 1.0),) if isinstance(wish, str) else wish or ()
    if len(parts) != 1 or len(lease.composition) != 1:
        return wish
    digest = lease.composition[0][0].key.digest
    return ((str(replace(Ref.parse(parts[0][0]), alias=None, digest=digest)), parts[0][1]),)
