"""Who is in VRAM and held by nobody: a line for each tenant, the longest unused first.

The lines are kept, so that whoever needs room looks at those who go and no further, however many there are. What is
listed is not looked after: that it was held again or read by a step is found out when somebody walks along its line.
So a lease that comes back costs one insertion at most, and nothing while what it had is listed still.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter

from adapterd.gpu_cache.records import Entry, LeaseRecord

_PLACE = attrgetter("spot")


class Idle:
    """Guarded by the cache's lock.

    Attributes:
        looked: how many entries were looked at so far by all who needed room.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[Entry]] = {}
        self._count = self.looked = 0

    def __len__(self) -> int:
        """Entries that are listed, those that were held again among them."""
        return sum(map(len, self._lines.values()))

    @property
    def tenants(self) -> tuple[str, ...]:
        """Those that may have any."""
        return tuple(self._lines)

    def add(self, entry: Entry) -> None:
        """Nobody holds it any more. Idempotent."""
        if entry.spot is None:
            self._count += 1
            self._put(entry, self._count)

    def remove(self, entry: Entry) -> None:
        """It goes. Idempotent."""
        if entry.spot is not None:
            line = self._lines[entry.key.tenant]
            del line[bisect_left(line, entry.spot, key=_PLACE)]
            entry.spot = None
            if not line:
                del self._lines[entry.key.tenant]

    def walk(self, tenant: str) -> Iterator[Entry]:
        """Those of a tenant that nobody holds, in order. Meanwhile nobody comes and nobody goes.

        Who is held again leaves the line: the last to let go of it lists it anew. Who was used since goes further back.
        """
        line, at = self._lines.get(tenant, []), 0
        while at < len(line):
            entry = line[at]
            self.looked += 1
            assert entry.spot is not None
            last_used, number = entry.spot
            if not entry.holders and entry.last_used == last_used:
                yield entry
                at += 1
                continue
            del line[at]
            entry.spot = None
            if not entry.holders:
                self._put(entry, number)
        if not line:
            self._lines.pop(tenant, None)

    def first(self, record: LeaseRecord, pages: int, slots: int) -> list[Entry] | None:
        """The longest unused, as many as free so much for `record`; None if there are not as many.

        For where all that is here is one tenant's, and nobody has a share that must be spared.
        """
        found: list[Entry] = []
        walks = chain.from_iterable(map(self.walk, self.tenants))
        while pages > 0 or slots > 0:
            entry = next((each for each in walks if may_go(each, record)), None)
            if entry is None:
                return None
            found.append(entry)
            pages -= entry.pages
            slots -= 1
        return found

    def _put(self, entry: Entry, number: int) -> None:
        entry.spot = entry.last_used, number
        insort(self._lines.setdefault(entry.key.tenant, []), entry, key=_PLACE)


class IdleOrder:
    """Who may go for the sake of `record`: an `eviction.Order` over the lines, which stay as they are."""

    def __init__(self, idle: Idle, record: LeaseRecord) -> None:
        self._idle, self._record = idle, record
        self._tenants = (record.tenant,) if record.purpose.brief else idle.tenants
        self._walks: dict[str, tuple[Iterator[Entry], list[Entry]]] = {}  # and who was passed on it, in order

    def take(self, able: Callable[[str], bool], fits: Callable[[Entry], bool]) -> Entry | None:
        first = None
        for tenant in self._tenants:
            head = self._first(tenant, fits) if able(tenant) else None
            if head is not None and (first is None or _PLACE(head) < _PLACE(first)):
                first = head
        if first is not None:
            self._walks[first.key.tenant][1].remove(first)
        return first

    def _first(self, tenant: str, fits: Callable[[Entry], bool]) -> Entry | None:
        """The first that fits, which stays among those that were passed."""
        if tenant not in self._walks:
            self._walks[tenant] = self._idle.walk(tenant), []
        walk, passed = self._walks[tenant]
        for entry in passed:
            if fits(entry):
                return entry
        for entry in walk:
            if may_go(entry, self._record):
                passed.append(entry)
                if fits(entry):
                    return entry
        return None


def may_go(entry: Entry, record: LeaseRecord) -> bool:
    """Resident, nobody has a claim on it (I12), no step reads it, no lease that goes before `record` wants it.

    A prefetch may take only what its own tenant had prefetched before, and what nobody has used since.
    """
    if not entry.copied or entry.dead or entry.holders or entry.tickets:
        return False
    if record.purpose.brief and (entry.used or entry.key.tenant != record.tenant):
        return False
    return not entry.spared_for(record)
