"""What was found of versions that are in VRAM no more, so that those which are still in host memory are asked for once.

Only what the stager could know anyway, had their entries stayed: facts never change, and a claim counts until trust
does. A revocation has all of it forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, NamedTuple

from adapterd.gpu_cache.host.interface import Facts
from adapterd.gpu_cache.host.records import Claim, Verified
from adapterd.gpu_cache.host.resolving import is_pinned
from adapterd.gpu_cache.records import Entry
from adapterd.loader.identity import BasePin, Ref, VersionKey

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved


class _Found(NamedTuple):
    facts: Facts
    rank: int
    verified: dict[Claim, Verified]


class Remembered:
    """Guarded by the cache's lock.

    Args:
        most: versions; those that went longest ago are forgotten first.
        here: the versions in host memory.
    """

    def __init__(self, most: int, here: Callable[[], Container[VersionKey]]) -> None:
        self._most, self._here = most, here
        self._found: OrderedDict[VersionKey, _Found] = OrderedDict()

    def keep(self, entry: Entry) -> None:
        """It goes."""
        if entry.facts is None or entry.dead:
            return
        self._found[entry.key] = _Found(entry.facts, entry.rank, entry.verified)
        if len(self._found) > self._most:
            self._found.popitem(last=False)

    def remind(self, entry: Entry) -> list[Verified]:
        """It is new: what it was verified as."""
        found = self._found.pop(entry.key, None)
        if found is None:
            return []
        entry.facts, entry.rank, entry.verified = found.facts, found.rank, found.verified
        return list(found.verified.values())

    def resolved(self, refs: Sequence[Ref], tenant: str, base: BasePin) -> list[Resolved] | None:
        """What the host would say, if every REF names a digest that is remembered and still there; else None."""
        found = [self._resolved(ref, base) for ref in refs if ref.tenant == tenant]
        known = [each for each in found if each is not None]
        if not refs or len(known) < len(refs):
            return None
        here = self._here()
        return known if all(VersionKey(tenant, base, each.version_digest) in here for each in known) else None

    def _resolved(self, ref: Ref, base: BasePin) -> Resolved | None:
        found = self._found.get(VersionKey(ref.tenant, base, ref.digest or "")) if is_pinned(ref) else None
        claims = () if found is None else (each.resolved for each in found.verified.values())
        return next((each for each in claims if each.adapter == ref.name), None)

    def clear(self) -> None:
        self._found.clear()
