"""The cache's own books: an entry a version, a record a lease. Guarded by the cache's lock; no logic of tiers.

An entry's bytes are in one of four places:

    absent --(loader: resolve, verify, pack)--> host --(copies issued)--> staging --(event done)--> resident

and with the host tier on, a resident entry may keep its host image, so that it comes back without the loader.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from adapterd.gpu_cache.composition import Asked, Component
from adapterd.gpu_cache.device import Event
from adapterd.gpu_cache.fences import Readers
from adapterd.gpu_cache.host.loading import Prepared
from adapterd.gpu_cache.slots import Resident
from adapterd.loader.errors import Problem
from adapterd.loader.identity import BasePin, VersionKey

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved


class Place(StrEnum):
    """Where an adapter's bytes are (ARCHITECTURE, Vocabulary)."""

    ABSENT = "absent"
    HOST = "host"
    STAGING = "staging"
    RESIDENT = "resident"


Claim = tuple[str, int]
"""Adapter and version number, as a source's answer claims them."""


def claim_of(resolved: Resolved) -> Claim:
    return resolved.adapter, resolved.version_number


@dataclass(frozen=True, slots=True)
class Verified:
    """A claim that the loader found to hold, when trust had changed `trust_changes` times."""

    resolved: Resolved
    trust_changes: int


class LeaseState(StrEnum):
    """A lease's life, forwards only."""

    RESOLVING = "resolving"
    WAITING = "waiting"  # for bytes, or for memory
    COPYING = "copying"  # has its pages: it pins
    READY = "ready"  # pins
    FAILED = "failed"
    RELEASED = "released"


@dataclass(eq=False, slots=True)
class Entry:
    """One version that somebody wants or that is still here.

    Attributes:
        verified: the claims (adapter and number) under which the loader has verified it. The bytes are the
            same under each, but each has its own admission statement: a claim counts only once checked, and
            until trust changes.
        checking: claims that a loader job is verifying.
        prepared: manifest, layout and a way to pack it, once the first claim was verified.
        filling: a loader job is packing it.
        image: its pages of the host slab; `filled` says that the verified bytes are in.
        resident: its pages and slot; `copied` says that the copy's event has completed.
        copy_event: of the copy that filled the pages.
        joined: the compute stream that already waits for `copy_event`.
        readers: marks of the steps that read the pages.
        waiting, holders: live leases without and with a claim on its pages, by sequence number.
        tickets: steps in flight that read it.
        dead: the base was reloaded; it goes as soon as nothing is in flight.
        last_used: tick.
    """

    key: VersionKey
    verified: dict[Claim, Verified] = field(default_factory=dict)
    checking: set[Claim] = field(default_factory=set)
    prepared: Prepared | None = None
    filling: bool = False
    image: tuple[int, ...] | None = None
    filled: bool = False
    resident: Resident | None = None
    copied: bool = False
    copy_event: Event | None = None
    joined: object = None
    readers: Readers = field(default_factory=Readers)
    waiting: dict[int, LeaseRecord] = field(default_factory=dict)
    holders: dict[int, LeaseRecord] = field(default_factory=dict)
    tickets: int = 0
    dead: bool = False
    last_used: int = 0

    @property
    def place(self) -> Place:
        if self.resident is not None:
            return Place.RESIDENT if self.copied else Place.STAGING
        return Place.HOST if self.filled else Place.ABSENT

    @property
    def wanted(self) -> bool:
        """Whether a live lease is on it."""
        return bool(self.waiting or self.holders)

    @property
    def in_flight(self) -> bool:
        """Whether a loader job, a copy or a step has to do with it."""
        return bool(self.checking or self.filling or self.tickets or self.place is Place.STAGING)

    @property
    def pages(self) -> int:
        assert self.prepared is not None
        return self.prepared.layout.n_pages

    def spared_for(self, seq: int) -> bool:
        """Whether a lease that waits longer than `seq`, or as long, wants it."""
        return any(waiting <= seq for waiting in self.waiting)


@dataclass(eq=False, slots=True)
class LeaseRecord:
    """One lease. `seq` counts acquires: smaller is older.

    Attributes:
        tenant, base: whose it is, and the base it was asked for.
        asked: as the caller named it.
        components: normalised; None until resolved.
        entries: one a component.
        claims: what must be verified for it: (entry, what it was found as), at least one an entry.
        residents: (resident, weight) a component, once ready.
        problems: why it failed.
    """

    seq: int
    tenant: str
    base: BasePin
    asked: tuple[Asked, ...]
    state: LeaseState = LeaseState.RESOLVING
    components: tuple[Component, ...] | None = None
    entries: tuple[Entry, ...] = ()
    claims: tuple[tuple[Entry, Resolved], ...] = ()
    residents: tuple[tuple[Resident, float], ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def live(self) -> bool:
        return self.state not in {LeaseState.FAILED, LeaseState.RELEASED}

    @property
    def settled(self) -> bool:
        """Nothing more will happen to it by itself."""
        return self.state in {LeaseState.READY, LeaseState.FAILED, LeaseState.RELEASED}
