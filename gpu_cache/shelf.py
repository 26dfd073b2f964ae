"""The entries there are, and how each of them goes: tidied up, evicted, buried."""

from __future__ import annotations

from collections.abc import Callable

from adapterd.gpu_cache.arrivals import Arrivals
from adapterd.gpu_cache.claims import Claims
from adapterd.gpu_cache.copies import CopyQueue
from adapterd.gpu_cache.records import Cause, Entry, LeaseRecord
from adapterd.gpu_cache.revocation import Scrubber
from adapterd.gpu_cache.vram_tier import VramTier
from adapterd.loader.identity import VersionKey


class Shelf:
    """Methods need the cache's lock.

    Args:
        again: has a lease begin again.
    """

    def __init__(
        self,
        vram: VramTier,
        copies: CopyQueue,
        claims: Claims,
        arrivals: Arrivals,
        scrubber: Scrubber,
        again: Callable[[LeaseRecord], None],
    ) -> None:
        self._vram, self._copies, self._claims, self._arrivals = vram, copies, claims, arrivals
        self._scrubber, self._again = scrubber, again
        self.entries: dict[VersionKey, Entry] = {}

    @property
    def given_up(self) -> list[Entry]:
        """Buried, but still in VRAM: something is in flight for them."""
        return self._vram.dead

    def entry(self, key: VersionKey) -> Entry:
        """That of the version, or a new one."""
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = Entry(key)
            self._claims.remind(found)
        return found

    def rest(self, entry: Entry) -> None:
        """Nobody holds it any more: what is here of it may go when room is needed."""
        if entry.copied:
            self._vram.idle.add(entry)

    def tidy(self, entry: Entry) -> None:
        """Gives back what an entry holds for nobody. Does nothing while anything is in flight for it."""
        if not entry.waiting:
            self._claims.let_go(entry)
        if entry.claimed and entry.resident is None and not entry.holders:
            self._arrivals.cancel(entry)
        if entry.spot is None and not entry.holders:
            self.rest(entry)
        if entry.wanted or entry.in_flight:
            return
        if entry.dead and entry.resident is not None:
            if entry.cause is Cause.REVOKED and not entry.scrubbed:
                self._scrubber.add(entry)
                return
            self._vram.evict(entry, entry.cause)
        if not entry.claimed:
            self.forget(entry)

    def bury(self, entry: Entry, cause: Cause) -> None:
        """It is found no more, and its slot is stale. Its bytes go when nothing is in flight.

        Leases that still want the version begin again; those that had it have failed by now.
        """
        entry.dead, entry.cause = True, cause
        self.forget(entry)
        if entry.resident is not None:
            self._vram.slots.revoke(entry.resident.slot)
            if cause is Cause.REVOKED:
                self._copies.stop(entry)
        for record in list(entry.waiting.values()):
            self._again(record)
        self.tidy(entry)

    def evict(self, entry: Entry) -> None:
        """Somebody asked for it. Nobody holds it, and nothing is in flight."""
        self._vram.evict(entry, Cause.ASKED)
        self.tidy(entry)

    def forget(self, entry: Entry) -> None:
        """It is found no more."""
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
            self._claims.remember(entry)
