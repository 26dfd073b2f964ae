"""Routes: aliases that are followed. New leases get the version that is current, without a question to anybody.

When an alias moves, its new version is brought beside the old one, and becomes current at a step boundary once all
of it is in VRAM: a step begins or ends, or none is in flight. Leases on the old one go on until they are released.
A new version that cannot be had leaves the old one current.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from adapterd.gpu_cache.branches import Branch, Keeper
from adapterd.gpu_cache.composition import Asked
from adapterd.loader.errors import Problem
from adapterd.loader.identity import Ref

if TYPE_CHECKING:
    from adapterd.gpu_cache.leases import Lease
    from adapterd.loader.sources import Resolved

HALVES = 1 << 64

Choice = tuple[tuple[Asked, ...], tuple["Resolved", ...], int | None]
"""What a new lease asks for, which versions that is, and the number of the lease that holds them; if known."""


@dataclass(frozen=True, slots=True)
class RouteState:
    """A route at one moment: the digests that are current, if any, and what is wrong."""

    current: str | None
    canary: str | None
    busy: bool
    problem: Problem | None


class RouteBooks(Protocol):
    """What a route asks of its cache, without the lock."""

    def acquire_by(self, tenant: str, choose: Callable[[], Choice], priority: int) -> Lease:
        """A lease on what `choose` says with the lock held."""
        ...

    def refresh_route(self, route: Route) -> None: ...

    def route_state(self, route: Route) -> RouteState: ...

    def close_route(self, route: Route) -> None: ...


class Route:
    """An alias, followed. Made by `AdapterCache.route`; a context manager, closed once. Thread-safe.

    While it lives its current versions stay in VRAM, at the expense of its tenant's budget, as pins do.
    """

    def __init__(
        self,
        books: RouteBooks,
        keeper: Keeper,
        ref: Ref,
        tenant: str,
        *,
        canary: tuple[Ref, float] | None = None,
        period: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ValueError for a share that is not between 0 and 1, or a period that is not positive."""
        if canary is not None and not 0.0 <= canary[1] <= 1.0:
            raise ValueError(f"a share is between 0 and 1, not {canary[1]}")
        if period is not None and not period > 0:
            raise ValueError(f"a period is positive, not {period}")
        self._books, self.tenant = books, tenant
        self.ref = replace(ref, alias=ref.wanted_alias)
        self.main = Branch(keeper, self.ref, tenant)
        self.canary = None if canary is None else Branch(keeper, canary[0], tenant)
        self._share = 0.0 if canary is None else canary[1]
        self._owed = 0.0
        self._period, self._clock = period, clock
        self._due = clock() + (period or 0.0)

    def acquire(self, key: bytes | str | None = None, *, priority: int = 0) -> Lease:
        """A lease on a current version, ready at once; before the first is there, on what the alias means, as
        `AdapterCache.acquire`.

        Args:
            key: of a conversation, say. Equal keys get the same side of a canary, in every worker and as long as the
                share stays; a larger share only moves keys to the canary. Without one the sides take turns.

        Raises:
            Failed: CACHE_CLOSED.
        """
        return self._books.acquire_by(self.tenant, lambda: self.choose(key), priority)

    def refresh(self) -> None:
        """Looks what the aliases mean now. Returns at once."""
        self._books.refresh_route(self)

    @property
    def state(self) -> RouteState:
        return self._books.route_state(self)

    @property
    def problem(self) -> Problem | None:
        """Why an alias's version is not current, or is not known; None if all is well."""
        return self.state.problem

    def close(self) -> None:
        """Lets go of its versions. Idempotent; leases that it gave go on."""
        self._books.close_route(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self.close()

    # With the cache's lock held

    @property
    def branches(self) -> tuple[Branch, ...]:
        return (self.main,) if self.canary is None else (self.main, self.canary)

    def choose(self, key: bytes | str | None) -> Choice:
        """A canary that is not there sends nobody away."""
        branch = self.main
        if self.canary is not None and self._is_canarys(key) and self.canary.known:
            branch = self.canary
        holder = branch.current.seq if branch.current is not None and branch.known else None
        return branch.asked, branch.known, holder

    def turn(self) -> None:
        """A step boundary."""
        for branch in self.branches:
            branch.turn()
        if self._period is not None and self._clock() >= self._due:
            self._due = self._clock() + self._period
            for branch in self.branches:
                if not branch.busy:
                    branch.refresh()

    def snapshot(self) -> RouteState:
        def digest(branch: Branch | None) -> str | None:
            return branch.known[0].version_digest if branch is not None and branch.known else None

        problems = [branch.problem for branch in self.branches if branch.problem is not None]
        busy = any(branch.busy for branch in self.branches)
        return RouteState(digest(self.main), digest(self.canary), busy, problems[0] if problems else None)

    def _is_canarys(self, key: bytes | str | None) -> bool:
        if key is None:
            self._owed += self._share
            turn = self._owed >= 1.0
            self._owed -= turn
            return turn
        data = key.encode() if isinstance(key, str) else key
        drawn = hashlib.sha256(str(self.ref).encode() + b"\0" + data).digest()
        return int.from_bytes(drawn[:8]) < self._share * HALVES


class Routes:
    """All routes of a cache. Guarded by its lock."""

    def __init__(self) -> None:
        self._routes: dict[int, Route] = {}

    def add(self, route: Route) -> None:
        self._routes[id(route)] = route

    def remove(self, route: Route) -> None:
        self._routes.pop(id(route), None)

    def __contains__(self, route: object) -> bool:
        return id(route) in self._routes

    def turn(self) -> None:
        for route in list(self._routes.values()):
            route.turn()

    def close(self) -> None:
        for route in self._routes.values():
            for branch in route.branches:
                branch.close()

    def refresh(self) -> None:
        for branch in self._branches():
            branch.refresh()

    def moved(self, tenant: str, adapter: str, alias: str) -> None:
        for branch in self._branches():
            ref = branch.ref
            if (ref.tenant, ref.name, ref.wanted_alias) == (tenant, adapter, alias):
                branch.refresh()

    def withdrawn(self, tenant: str, adapter: str, digest: str) -> None:
        """It can be had by its digest only."""
        for branch in self._branches():
            if (branch.ref.tenant, branch.ref.name) == (tenant, adapter) and branch.ref.wanted_alias is not None:
                branch.withdraw(digest)

    def _branches(self) -> list[Branch]:
        return [branch for route in self._routes.values() for branch in route.branches]
