"""What a cache does when its registry's world changes: revocations, events, routes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from adapterd.gpu_cache.cache_books import CacheBooks
from adapterd.gpu_cache.composition import Asked
from adapterd.gpu_cache.events import AliasMoved, Event, KeyRevoked, Quarantined, Released, Yanked
from adapterd.gpu_cache.leases import Lease
from adapterd.gpu_cache.records import Ask, LeaseRecord, Purpose
from adapterd.gpu_cache.revocation import Revocation
from adapterd.gpu_cache.routes import Choice, Route, RouteState
from adapterd.loader.identity import Ref

if TYPE_CHECKING:
    from adapterd.gpu_cache.asking import Then
    from adapterd.loader.sources import Resolved


class Following(CacheBooks):
    """Part of `AdapterCache`. Thread-safe; nothing here blocks."""

    # What a registry tells

    def revoke(self, revocation: Revocation) -> None:
        """Nothing that it is about is served any more: see `revocation`. Returns at once. Idempotent.

        Leases on it fail with VERSION_REVOKED, in `begin_step` too; steps in flight finish. Its pages are zeroed
        behind the last of them.
        """
        with self._lock:
            self._revoker.revoke(revocation)
            self._stager.remembered.clear()
            self._stager.finish()
        self._issue_if_idle()

    def reinstate(self, revocation: Revocation) -> bool:
        """Takes a revocation back; False if there is none. What it drove out comes back when it is asked for."""
        with self._lock:
            return self._refusals.remove(revocation)

    def heed(self, event: Event) -> None:
        """For an `EventFollower`. Any number of times."""
        match event:
            case Quarantined(tenant, adapter, number, digest, reason):
                self.revoke(Revocation(tenant, digest, adapter, number, reason=reason or "quarantined"))
            case Released(tenant, adapter, number, digest):
                self.reinstate(Revocation(tenant, digest, adapter, number))
            case KeyRevoked(tenant, key_id, reason):
                self.revoke(Revocation(tenant, key_id=key_id, reason=reason or f"key {key_id} was revoked"))
            case Yanked(tenant, adapter, _, digest):
                with self._lock:
                    self._routes.withdrawn(tenant, adapter, digest)
            case AliasMoved(tenant, adapter, alias):
                with self._lock:
                    self._routes.moved(tenant, adapter, alias)

    # Routes

    def route(
        self,
        ref: str,
        *,
        tenant: str,
        canary: tuple[str, float] | None = None,
        period: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Route:
        """An alias to be followed: see `Route`. Its first version is being brought when this returns.

        Args:
            canary: another REF, and which share of new leases it gets (0 to 1).
            period: seconds after which the aliases are looked up without being told; None for never.
            clock: seconds.

        Raises:
            Failed: CACHE_CLOSED, REF_INVALID.
        """
        second = None if canary is None else (Ref.parse(canary[0]), canary[1])
        route = Route(self, _Keeper(self), Ref.parse(ref), tenant, canary=second, period=period, clock=clock)
        with self._lock:
            self._check_open()
            self._routes.add(route)
            for branch in route.branches:
                branch.refresh()
        return route

    def acquire_by(self, tenant: str, choose: Callable[[], Choice], priority: int) -> Lease:
        """For `Route.acquire`."""
        with self._lock:
            self._check_open()
            self._notice()
            asked, resolved, holder = choose()
            record = None if holder is None else self._warm(holder, tenant, priority)
            if record is None:
                record = self._begin(tenant, (asked, ()), priority, resolved=resolved)
                self._seen.remember(holder, record)  # of None nothing is remembered
            lease = self._lease(record)
        self._issue_if_idle()
        return lease

    def refresh_route(self, route: Route) -> None:
        """For `Route.refresh`."""
        with self._lock:
            for branch in route.branches if route in self._routes else ():
                branch.refresh()

    def route_state(self, route: Route) -> RouteState:
        """For `Route.state`."""
        with self._lock:
            self._notice()
            return route.snapshot()

    def close_route(self, route: Route) -> None:
        """For `Route.close`."""
        with self._lock:
            self._routes.remove(route)
            for branch in route.branches:
                branch.close()


class _Keeper:
    """What the branches of routes ask of their cache. With the lock held."""

    def __init__(self, cache: CacheBooks) -> None:
        self._cache = cache

    def resolve(self, ref: Ref, tenant: str, then: Then[tuple[Resolved, ...]]) -> Ask:
        return self._cache._stager.desk.resolve([ref], tenant, then)

    def give_up(self, ask: Ask | None) -> None:
        self._cache._stager.desk.let_go(ask)

    def keep(self, asked: tuple[Asked, ...], tenant: str, resolved: tuple[Resolved, ...]) -> LeaseRecord:
        return self._cache._begin(tenant, (asked, ()), purpose=Purpose.KEEP, resolved=resolved)

    def let_go(self, record: LeaseRecord | None) -> None:
        if record is not None:
            self._cache._release(record)
