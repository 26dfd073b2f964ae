"""The list of leases: who holds one, which were dropped, how many there have been."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from adapterd.gpu_cache.composition import Asked
from adapterd.gpu_cache.records import LeaseRecord, LeaseState, Purpose
from adapterd.loader.identity import BasePin


class LeaseBook:
    """Every lease that was not released. Guarded by the cache's lock, but for `dropped`."""

    def __init__(self) -> None:
        self._held: dict[int, LeaseRecord] = {}
        self._count = 0
        self.released = 0
        self.leaked = 0
        self.dropped: deque[LeaseRecord] = deque()
        """Where finalizers put the records of leases that nobody holds any more. Appending needs no lock (I12)."""

    def new(
        self,
        tenant: str,
        base: BasePin,
        asked: tuple[Asked, ...],
        priority: int = 0,
        purpose: Purpose = Purpose.USE,
    ) -> LeaseRecord:
        self._count += 1
        record = LeaseRecord(self._count, tenant, base, asked, priority, purpose)
        self._held[record.seq] = record
        return record

    def forget(self, record: LeaseRecord) -> None:
        """It came to nothing, and nobody has heard of it."""
        del self._held[record.seq]
        self._count -= 1

    def strike(self, record: LeaseRecord) -> bool:
        """Takes it off the list; False if it was off already."""
        if self._held.pop(record.seq, None) is None:
            return False
        self.released += 1
        return True

    def found(self) -> Iterator[LeaseRecord]:
        """Leases that were dropped without a release, since the last call."""
        while self.dropped:
            record = self.dropped.popleft()
            if record.seq in self._held:
                self.leaked += record.live
                yield record

    def live(self) -> list[LeaseRecord]:
        return [record for record in self._held.values() if record.live]

    def states(self) -> list[LeaseState]:
        """Of all that are held."""
        return [record.state for record in self._held.values()]
