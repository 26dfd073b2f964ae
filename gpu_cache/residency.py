"""What is where: the list that routers and operators read, and the ledger of what versions are known as.

The ledger remembers of each version that is in VRAM or in host memory under which names it was verified, and
which publisher's key signed it. The host's images have no names, and what left VRAM has no entry; for what is in
neither, nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adapterd.gpu_cache.host.interface import Facts
from adapterd.gpu_cache.host.records import Claim, claim_of
from adapterd.gpu_cache.records import Entry, Place, Purpose
from adapterd.loader.identity import BasePin, Ref, VersionKey

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved

NOTHING: Mapping[Claim, str | None] = {}
LEAST_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class Residence:
    """One version, as of one moment.

    Attributes:
        tenant, digest: which version; bare lower hex.
        adapters: the names under which it was verified, without the tenant; sorted.
        tier: where its bytes are; the nearest to the engine, if they are in several places.
        bytes: of its packed form, in whole pages; 0 until it is known.
        rank: the largest of its modules; 0 until it is known.
        slot, generation: in VRAM; None elsewhere.
        pinned: whether a pin or a route is on it.
        leases: live ones, without those of pins and routes. Paused ones are on nothing.
        priority: the highest of those that wait; 0 if none does.
        last_used: tick of its last acquire or step in this cache; 0 if there was none.
    """

    tenant: str
    digest: str
    adapters: tuple[str, ...]
    tier: Place
    bytes: int
    rank: int
    slot: int | None = None
    generation: int | None = None
    pinned: bool = False
    leases: int = 0
    priority: int = 0
    last_used: int = 0


@dataclass(slots=True)
class _Known:
    rank: int
    claims: dict[Claim, str | None] = field(default_factory=dict)


class Ledger:
    """Names of versions. Guarded by the cache's lock.

    Args:
        here: the versions that are in VRAM, in host memory, or wanted. The rest is forgotten from time to time.
    """

    def __init__(self, here: Callable[[], Collection[VersionKey]]) -> None:
        self._here = here
        self._known: dict[VersionKey, _Known] = {}
        self._aliases: dict[tuple[str, str, str], VersionKey] = {}
        self._limit = LEAST_LIMIT

    def __len__(self) -> int:
        return len(self._known) + len(self._aliases)

    def verified(self, key: VersionKey, resolved: Resolved, facts: Facts) -> None:
        """A claim was found to hold."""
        known = self._known.setdefault(key, _Known(max((m.rank for m in facts.manifest.modules), default=0)))
        known.claims[claim_of(resolved)] = facts.publisher
        self._prune()

    def named(self, ref: Ref, key: VersionKey) -> None:
        """The source said what `ref` means now."""
        if ref.wanted_alias is not None:
            self._aliases[ref.tenant, ref.name, ref.wanted_alias] = key
            self._prune()

    def claims(self, key: VersionKey) -> Mapping[Claim, str | None]:
        """Adapter and number under which it was verified; for each the publisher's key id, or None for unsigned."""
        known = self._known.get(key)
        return NOTHING if known is None else known.claims

    def publisher(self, key: VersionKey, resolved: Resolved) -> str | None:
        return self.claims(key).get(claim_of(resolved))

    def rank(self, key: VersionKey) -> int:
        return self._known[key].rank if key in self._known else 0

    def find(self, ref: Ref, base: BasePin) -> VersionKey | None:
        """Which version `ref` names, as far as it is known here. Nobody is asked."""
        if ref.wanted_alias is not None:
            key = self._aliases.get((ref.tenant, ref.name, ref.wanted_alias))
            fits = key is not None and key.base == base and ref.digest in {None, key.digest}
            return key if fits else None
        key = VersionKey(ref.tenant, base, ref.digest or "")
        claims = self.claims(key)
        return key if not claims or any(adapter == ref.name for adapter, _ in claims) else None

    def strike(self, key: VersionKey, claims: Collection[Claim]) -> None:
        """These do not hold any more."""
        known = self._known.get(key)
        for claim in claims if known is not None else ():
            assert known is not None
            known.claims.pop(claim, None)

    def _prune(self) -> None:
        if len(self) <= self._limit:
            return
        here = self._here()
        self._known = {key: known for key, known in self._known.items() if key in here}
        self._aliases = {name: key for name, key in self._aliases.items() if key in here}
        self._limit = max(LEAST_LIMIT, 2 * len(self))


def residences(
    entries: Mapping[VersionKey, Entry],
    images: Mapping[VersionKey, int],
    base: BasePin,
    ledger: Ledger,
    page_bytes: int,
) -> tuple[Residence, ...]:
    """Every version of that base which has bytes here or is wanted, by tenant and digest."""
    keys = {key for key in (*entries, *images) if key.base == base}
    return tuple(
        _residence(key, entries.get(key), images.get(key), ledger, page_bytes)
        for key in sorted(keys, key=lambda k: (k.tenant, k.digest))
    )


def _residence(key: VersionKey, entry: Entry | None, image: int | None, ledger: Ledger, page_bytes: int) -> Residence:
    adapters = tuple(sorted({adapter for adapter, _ in ledger.claims(key)}))
    if entry is None:
        return Residence(key.tenant, key.digest, adapters, Place.HOST, image or 0, ledger.rank(key))
    tier = Place.HOST if image is not None and not entry.claimed else entry.place
    size = image or 0 if entry.facts is None else entry.pages * page_bytes
    records = (*entry.waiting.values(), *entry.holders.values())
    return Residence(
        key.tenant, key.digest, adapters, tier, size, ledger.rank(key),
        slot=None if entry.resident is None else entry.resident.slot,
        generation=None if entry.resident is None else entry.resident.generation,
        pinned=entry.kept,
        leases=sum(record.purpose is not Purpose.KEEP for record in records),
        priority=max((record.priority for record in entry.waiting.values()), default=0),
        last_used=entry.last_used,
    )  # fmt: skip
