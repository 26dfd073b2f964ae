"""What is where: the list that routers and operators read, and the ledger of what versions are known as.

The ledger remembers of each version that is in VRAM or in host memory under which names it was verified, and
which publisher's key signed it. The host's images have no names, and what left VRAM has no entry; for what is in
neither, nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adapterd.gpu_cache.host.interface import Facts
from adapterd.gpu_cache.host.records import Claim, claim_of
from adapterd.gpu_cache.records import Entry, LeaseRecord, Place, Purpose
from adapterd.gpu_cache.slots import Resident
from adapterd.loader.identity import BasePin, Ref, VersionKey
from adapterd.loader.manifest import Manifest

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved

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


@dataclass(frozen=True, slots=True)
class Known:
    """What the ledger remembers of a version: it is replaced, never changed, so whoever has it may read it freely.

    Attributes:
        rank: the largest of its modules.
        claims: adapter and number under which it was verified; for each the publisher's key id, None for unsigned.
        adapters: the names in `claims`, sorted.
    """

    rank: int = 0
    claims: Mapping[Claim, str | None] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()

    def claiming(self, claims: Mapping[Claim, str | None]) -> Known:
        return Known(self.rank, claims, tuple(sorted({adapter for adapter, _ in claims})))


UNKNOWN = Known()


class Ledger:
    """Names of versions. Guarded by the cache's lock.

    Args:
        here: the versions that are in VRAM, in host memory, or wanted. The rest is forgotten from time to time.
    """

    def __init__(self, here: Callable[[], Collection[VersionKey]]) -> None:
        self._here = here
        self._known: dict[VersionKey, Known] = {}
        self._aliases: dict[tuple[str, str, str], VersionKey] = {}
        self._limit = LEAST_LIMIT

    def __len__(self) -> int:
        return len(self._known) + len(self._aliases)

    def verified(self, key: VersionKey, resolved: Resolved, manifest: Manifest, publisher: str | None) -> int:
        """A claim was found to hold, signed by that key: the largest rank of the version's modules."""
        known = self._known.get(key) or Known(max((m.rank for m in manifest.modules), default=0))
        claim = claim_of(resolved)
        if known.claims.get(claim, "") != publisher:
            self._known[key] = known.claiming({**known.claims, claim: publisher})
            self._prune()
        return known.rank

    def named(self, ref: Ref, key: VersionKey) -> None:
        """The source said what `ref` means now."""
        if ref.wanted_alias is not None:
            self._aliases[ref.tenant, ref.name, ref.wanted_alias] = key
            self._prune()

    def claims(self, key: VersionKey) -> Mapping[Claim, str | None]:
        """Adapter and number under which it was verified; for each the publisher's key id, or None for unsigned."""
        return self._known.get(key, UNKNOWN).claims

    def publisher(self, key: VersionKey, resolved: Resolved) -> str | None:
        return self.claims(key).get(claim_of(resolved))

    def copy(self) -> dict[VersionKey, Known]:
        """All that is known now. It costs a copy of a dict, whatever is in it."""
        return self._known.copy()

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
        if known is not None and claims:
            self._known[key] = known.claiming({c: by for c, by in known.claims.items() if c not in claims})

    def _prune(self) -> None:
        if len(self) <= self._limit:
            return
        here = self._here()
        self._known = {key: known for key, known in self._known.items() if key in here}
        self._aliases = {name: key for name, key in self._aliases.items() if key in here}
        self._limit = max(LEAST_LIMIT, 2 * len(self))


Look = tuple[VersionKey, Place, Resident | None, Facts | None, tuple[LeaseRecord, ...], tuple[LeaseRecord, ...], int]
"""An entry at one moment: key, place, resident, facts, who waits for it, who holds it, tick of its last use."""


def look(entries: Iterable[Entry]) -> list[Look]:
    """With the cache's lock held, which serving waits for: so everything else is made of it later, without the lock."""
    return [
        (e.key, e.place, e.resident, e.facts, tuple(e.waiting.values()), tuple(e.holders.values()), e.last_used)
        for e in entries
    ]


def is_kept(looked: Look) -> bool:
    """Whether a pin or a route is on it."""
    _, _, _, _, waiting, holders, _ = looked
    return any(record.purpose is Purpose.KEEP for record in (*holders, *waiting))


def residences(
    looks: Iterable[Look],
    images: Mapping[VersionKey, int],
    base: BasePin,
    known: Mapping[VersionKey, Known],
    page_bytes: int,
) -> tuple[Residence, ...]:
    """Every version of that base which has bytes here or is wanted, by tenant and digest."""
    rows = {each[0]: each for each in looks}
    found = [_residence(row, images.get(key), known, page_bytes) for key, row in rows.items() if key.base == base]
    for key, nbytes in images.items():
        if key not in rows and key.base == base:
            of = known.get(key, UNKNOWN)
            found.append(Residence(key.tenant, key.digest, of.adapters, Place.HOST, nbytes, of.rank))
    return tuple(sorted(found, key=lambda row: (row.tenant, row.digest)))


def _residence(looked: Look, image: int | None, known: Mapping[VersionKey, Known], page_bytes: int) -> Residence:
    key, place, resident, facts, waiting, holders, last_used = looked
    of = known.get(key, UNKNOWN)
    return Residence(
        key.tenant,
        key.digest,
        of.adapters,
        Place.HOST if image is not None and place is Place.ABSENT else place,
        image or 0 if facts is None else facts.layout.n_pages * page_bytes,
        of.rank,
        slot=None if resident is None else resident.slot,
        generation=None if resident is None else resident.generation,
        pinned=is_kept(looked),
        leases=sum(record.purpose is not Purpose.KEEP for record in (*waiting, *holders)),
        priority=max((record.priority for record in waiting), default=0),
        last_used=last_used,
    )
