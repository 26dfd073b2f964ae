"""Whose copies are enqueued next: the link is shared by tenants, page by page, whatever each has queued (I10).

Next is the tenant that was given the fewest pages since the queue was last empty. One that comes later starts
where the least served of the others is (start-time fair queueing, Goyal, Vin and Cheng, 1996), so that it neither
pays for having been away nor is paid for it. A tenant's own transfers go in the order in which they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Owned(Protocol):
    """What can be queued."""

    @property
    def tenant(self) -> str: ...


T = TypeVar("T", bound=Owned)


class CopyTurns(Generic[T]):
    """Queued transfers. Guarded by the cache's lock."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}
        self._given: dict[str, int] = {}  # pages; of tenants that have queued something since it was last empty

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[T]:
        return (item for queue in self._queues.values() for item in queue)

    def __contains__(self, item: T) -> bool:
        return item in self._queues.get(item.tenant, ())

    def add(self, item: T) -> None:
        tenant = item.tenant
        if tenant not in self._queues:
            least = min((self._given[each] for each in self._queues), default=0)
            self._given[tenant] = max(self._given.get(tenant, 0), least)
            self._queues[tenant] = deque()
        self._queues[tenant].append(item)

    def next(self) -> T | None:
        """The one whose turn it is."""
        tenant = min(self._queues, key=self._given.__getitem__, default=None)
        return None if tenant is None else self._queues[tenant][0]

    def piece(self, pages: int) -> int:
        """How many of so many pages a turn has: one, or an equal share if that is more."""
        return max(1, pages // max(1, len(self._queues)))

    def given(self, item: T, pages: int) -> None:
        """So many pages of it were enqueued."""
        self._given[item.tenant] += pages

    def remove(self, item: T) -> None:
        queue = self._queues[item.tenant]
        queue.remove(item)
        if not queue:
            del self._queues[item.tenant]
        if not self._queues:
            self._given.clear()
