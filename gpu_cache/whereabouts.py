"""Where adapters are, as the selector wants to know it, from what the cache says about itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from adapterd.gpu_cache.records import Place
from adapterd.gpu_cache.step_budget import AdapterKey


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where an adapter is, and its bytes in VRAM: of the packed form; an upper bound where it was never loaded."""

    place: Place
    nbytes: int


Residency = Mapping[AdapterKey, Whereabouts]


class ResidencyRow(Protocol):
    """One version in the cache's own list, as `AdapterCache.residency` gives it.

    Attributes:
        tenant, digest: which version.
        tier: a `Place`, by name.
        bytes: of its packed form.
        leases: live ones.
    """

    @property
    def tenant(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def tier(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def leases(self) -> int: ...


def whereabouts(rows: Iterable[ResidencyRow]) -> dict[AdapterKey, Whereabouts]:
    """The residency that `Selector.select` takes.

    What is not in VRAM and has a live lease is on the way: the cache works on it, be it a download or a copy.
    """
    return {(row.tenant, row.digest): Whereabouts(_place(row), row.bytes) for row in rows}


def _place(row: ResidencyRow) -> Place:
    place = Place(row.tier)
    return Place.STAGING if row.leases and place is not Place.RESIDENT else place
