"""Short ways to a lease: what the last one of the same wish came to, if all of that still holds.

Nothing is decided here. The stager has decided it for an earlier lease on the same pinned version: which entry it
is, that its claim holds, that it is in VRAM. What could have changed since is looked at; if any of it has, the
lease goes the long way. So this may be left out at any time, and the answers stay the same.

What a wish for a pinned version means stays the same also when that has left VRAM. So it need not be read and put
together again; whether it may be had is asked and decided anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterd.gpu_cache.composition import Asked, Component
from adapterd.gpu_cache.host.records import Verified, claim_of
from adapterd.gpu_cache.host.resolving import is_pinned
from adapterd.gpu_cache.records import Entry, LeaseRecord, LeaseState, Purpose
from adapterd.gpu_cache.slots import Resident
from adapterd.loader.identity import BasePin
from adapterd.loader.sources.interface import Resolved


@dataclass(frozen=True, slots=True)
class _Seen:
    """A lease on one pinned version, as it was when it became ready."""

    base: BasePin
    asked: tuple[Asked, ...]
    resolved: tuple[Resolved, ...]
    components: tuple[Component, ...]
    claims: tuple[tuple[Entry, Resolved], ...]
    residents: tuple[tuple[Resident, float], ...]
    entry: Entry
    verified: Verified
    claim: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a REF that names a digest came to: one version, as the host has found it."""

    asked: tuple[Asked, ...]
    resolved: tuple[Resolved, ...]
    components: tuple[Component, ...]


class WarmLeases:
    """Guarded by the cache's lock.

    Args:
        most: how many wishes are remembered; then all are forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[tuple[str, str | int], _Seen] = {}
        self._meanings: dict[tuple[str, str], Meaning] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def knows(self, tenant: str, wish: object) -> bool:
        """Whether `fill` has something to look at."""
        return isinstance(wish, str | int) and (tenant, wish) in self._seen

    def meaning(self, tenant: str, wish: object, base: BasePin) -> Meaning | None:
        """What the wish means for that base, if it is known."""
        found = self._meanings.get((tenant, wish)) if isinstance(wish, str) else None
        return found if found is not None and found.components[0].key.base is base else None

    def remember(self, wish: object, record: LeaseRecord) -> None:
        """What a lease came to, if it is of the kind that can be had the short way again.

        Args:
            wish: a REF that names a digest; or the number of the lease by which a route holds its current version.
        """
        self._understand(wish, record)
        one = len(record.asked) == len(record.entries) == len(record.residents) == 1
        ready = record.state is LeaseState.READY and record.components is not None
        if not isinstance(wish, str | int) or not one or not ready:
            return
        assert record.components is not None
        entry, resolved = record.entries[0], record.resolved[0]
        claim = claim_of(resolved)
        verified = entry.verified.get(claim)
        if verified is None or (isinstance(wish, str) and not is_pinned(record.asked[0].ref)):
            return
        if len(self._seen) >= self._most:
            self._seen.clear()
        self._seen[record.tenant, wish] = _Seen(
            record.base, record.asked, record.resolved, record.components, record.claims, record.residents,
            entry, verified, claim,
        )  # fmt: skip

    def _understand(self, wish: object, record: LeaseRecord) -> None:
        if not isinstance(wish, str) or not record.components or not is_pinned(record.asked[0].ref):
            return
        if len(self._meanings) >= self._most:
            self._meanings.clear()
        self._meanings[record.tenant, wish] = Meaning(record.asked, record.resolved, record.components)

    def fill(self, record: LeaseRecord, wish: object, trust_changes: int, tick: int) -> bool:
        """Makes `record`, a new lease on `wish`, ready and has it pin. False, and nothing done, if it is not known."""
        seen = self._seen.get((record.tenant, wish)) if isinstance(wish, str | int) else None
        if seen is None:
            return False
        entry = seen.entry
        holds = (  # a reloaded base has no entry that is not dead, and a resident that once was copied stays so
            entry.resident is seen.residents[0][0]
            and not entry.dead
            and entry.verified.get(seen.claim) is seen.verified
            and seen.verified.trust_changes == trust_changes
        )
        if not holds:
            del self._seen[record.tenant, wish]  # type: ignore[arg-type]
            return False
        record.asked, record.resolved, record.components = seen.asked, seen.resolved, seen.components
        record.entries, record.claims, record.residents = (entry,), seen.claims, seen.residents
        record.state = LeaseState.READY
        entry.holders[record.seq] = record
        entry.used, entry.last_used = True, tick
        return True


def plain(record: LeaseRecord) -> bool:
    """Whether a lease is on nothing but what it pins: ready, and a user's."""
    return record.state is LeaseState.READY and record.purpose is Purpose.USE
