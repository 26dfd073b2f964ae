"""The host's entries by what they are: one for every version, base, dtype and part that somebody wants or wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adapterd.gpu_cache.host.loading import Serving
from adapterd.gpu_cache.host.records import EntryKey, HostEntry
from adapterd.gpu_cache.host.resolving import is_pinned
from adapterd.loader.identity import BasePin, Ref, VersionKey

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved


class Entries:
    """What can be found. Methods need the host's lock."""

    def __init__(self) -> None:
        self._found: dict[EntryKey, HostEntry] = {}
        self._tick = 0

    def wanted(self, resolved: Resolved, tenant: str, serving: Serving) -> HostEntry:
        """The entry, made if there is none, and used now."""
        key = VersionKey(tenant, serving.base.pin, resolved.version_digest)
        found = self._found.get(_at(key, serving))
        if found is None:
            found = self._found[_at(key, serving)] = HostEntry(key, serving)
        self.touch(found)
        return found

    def touch(self, entry: HostEntry) -> None:
        """It is used now."""
        self._tick += 1
        entry.last_used = self._tick

    def known(self, asked: Sequence[Ref], tenant: str, serving: Serving) -> tuple[Resolved, ...] | None:
        """What the source would say, if every REF names a digest whose verified bytes are here; else None."""
        found = [self.here(ref, tenant, serving) for ref in asked]
        known = [each[1] for each in found if each is not None]
        return tuple(known) if len(known) == len(found) else None

    def here(self, wanted: Ref | Resolved, tenant: str, serving: Serving) -> tuple[HostEntry, Resolved] | None:
        """The entry whose bytes are in the slab, and what it was found as, under the name that is asked for."""
        digest = wanted.digest if isinstance(wanted, Ref) and is_pinned(wanted) else None
        if not isinstance(wanted, Ref):
            digest = wanted.version_digest
        if digest is None or wanted.tenant != tenant:
            return None
        entry = self._found.get(_at(VersionKey(tenant, serving.base.pin, digest), serving))
        if entry is None or not entry.filled:
            return None
        if not isinstance(wanted, Ref):
            return entry, wanted
        claims = (each.resolved for each in entry.verified.values())
        return next(((entry, each) for each in claims if each.adapter == wanted.name), None)

    def __len__(self) -> int:
        return len(self._found)

    def holds(self, entry: HostEntry) -> bool:
        """Whether it is the one that is found."""
        return self._found.get(_at(entry.key, entry.serving)) is entry

    def leave(self, entry: HostEntry) -> None:
        """It is found no more."""
        del self._found[_at(entry.key, entry.serving)]

    def of_version(self, key: VersionKey) -> list[HostEntry]:
        return [entry for entry in self._found.values() if entry.key == key]

    def of_base(self, base: BasePin) -> list[HostEntry]:
        return [entry for entry in self._found.values() if entry.key.base == base]


def _at(key: VersionKey, serving: Serving) -> EntryKey:
    return key, serving.dtype, serving.sharding.digest
