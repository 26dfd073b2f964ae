"""Who waits for memory, in which order: the higher priority first, then the older, one line a tenant.

Within a tenant the first that cannot be served holds up those behind it, so that a large adapter is not starved
by small ones. Tenants do not hold up each other. A pass costs as much as it serves, whatever the lines' length.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Rank = tuple[int, int]
"""(−priority, number): the smaller goes first."""


class Waiting(Protocol):
    """What can stand in a line. `number` is its age: smaller is older, and no two in the same lines have one."""

    @property
    def tenant(self) -> str: ...

    @property
    def priority(self) -> int: ...

    @property
    def number(self) -> int: ...


T = TypeVar("T", bound=Waiting)


def rank(item: Waiting) -> Rank:
    return -item.priority, item.number


class Lines(Generic[T]):
    """Lines of all tenants for one memory. Guarded by its owner's lock."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[Rank, T]]] = {}  # no two ranks are equal: items are not compared

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, item: T) -> None:
        """Idempotent."""
        line, place = self._lines.setdefault(item.tenant, []), (rank(item),)
        index = bisect_left(line, place)
        if index == len(line) or line[index][1] is not item:
            line.insert(index, (place[0], item))

    def remove(self, item: T) -> None:
        """Nothing happens if it does not wait here."""
        line = self._lines.get(item.tenant)
        if line is None:
            return
        index = bisect_left(line, (rank(item),))
        if index < len(line) and line[index][1] is item:
            del line[index]
            if not line:
                del self._lines[item.tenant]

    def serve(self, attempt: Callable[[T], bool]) -> None:
        """Lets each have an attempt, in order. One that says True leaves; one that says False ends its line.

        An attempt may add and remove others.
        """
        heads = [(line[0][0], tenant) for tenant, line in self._lines.items()]
        heapq.heapify(heads)
        while heads:
            place, tenant = heapq.heappop(heads)
            found = self._from(tenant, place)
            if found is None:
                continue
            now, item = found
            if now != place:  # who stood there has gone: the next one's turn may come later
                heapq.heappush(heads, (now, tenant))
                continue
            if attempt(item):
                self.remove(item)
                if tenant in self._lines:
                    heapq.heappush(heads, (place, tenant))

    def _from(self, tenant: str, place: Rank) -> tuple[Rank, T] | None:
        """The first of the tenant's line at or behind `place`."""
        line = self._lines.get(tenant)
        if line is None:
            return None
        index = bisect_left(line, (place,))
        return line[index] if index < len(line) else None
