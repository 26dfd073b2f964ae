"""The host's requests that are not over, by number, and why one is not taken. Guarded by the host's lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from adapterd.gpu_cache.budgets import TenantBudget, queue_full
from adapterd.gpu_cache.host.interface import Failure
from adapterd.gpu_cache.host.records import Request
from adapterd.gpu_cache.host.resolving import missing
from adapterd.loader.errors import Code, reject

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved

CLOSED = Failure((reject(Code.CACHE_CLOSED, "host", "the host was closed"),))


class Requests:
    """Those that wait, and those that hold what they were answered with.

    Args:
        waiting: how many of each tenant wait for an answer, which `enter` adds to.
    """

    def __init__(self, waiting: Counter[str], tenants: Mapping[str, TenantBudget], default: TenantBudget) -> None:
        self._open: dict[int, Request] = {}
        self._waiting, self._tenants, self._default = waiting, tenants, default
        self._count = 0
        self.closed = False

    def next(self) -> int:
        """A number that was never used."""
        self._count += 1
        return self._count

    def enter(self, request: Request, wanted: Iterable[Resolved]) -> Failure | None:
        """Puts a request that waits into the books; why it has to be refused, if it has to."""
        self.hold(request)
        self._waiting[request.tenant] += 1
        most = self._tenants.get(request.tenant, self._default).max_waiting
        foreign = next((each for each in wanted if each.tenant != request.tenant), None)
        if self.closed:
            return CLOSED
        if foreign is not None:
            return Failure(missing(foreign.ref).problems)
        if self._waiting[request.tenant] > most:
            return Failure((queue_full(request.tenant, most),))
        return None

    def hold(self, request: Request) -> None:
        """Puts one into the books that waits for nothing."""
        self._open[request.number] = request

    def find(self, number: int) -> Request | None:
        return self._open.get(number)

    def leave(self, request: Request) -> None:
        """It is over. One that is over already stays so."""
        self._open.pop(request.number, None)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Request]:
        """As of now, whatever is done to them meanwhile."""
        return iter(list(self._open.values()))
