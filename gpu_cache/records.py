"""The cache's own books: an entry a version, a record a lease. Guarded by the cache's lock; no logic of tiers.

An entry's bytes are in one of four places:

    absent --(the host: resolve, verify, fetch)--> host --(room in VRAM, copies)--> staging --(event done)--> resident

What is in host memory the host knows; here is what is in VRAM, what is on its way there, and what leases want.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from adapterd.gpu_cache.composition import Asked, Component
from adapterd.gpu_cache.fences import OPEN, Fence, Readers
from adapterd.gpu_cache.host.interface import Facts, Image
from adapterd.gpu_cache.host.records import Claim, Verified
from adapterd.gpu_cache.lines import rank
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


class Cause(StrEnum):
    """Why an adapter left VRAM."""

    ROOM = "room"  # for another one
    RELOAD = "reload"
    REVOKED = "revoked"
    ASKED = "asked"


class Purpose(StrEnum):
    """What a lease is for. Users hold what they use; the cache itself holds the rest."""

    USE = "use"
    PREFETCH = "prefetch"  # until it is in VRAM
    TO_HOST = "to-host"  # until it is in host memory
    KEEP = "keep"  # a pin or a route: until that ends

    @property
    def brief(self) -> bool:
        """It ends by itself."""
        return self is Purpose.PREFETCH or self is Purpose.TO_HOST


class LeaseState(StrEnum):
    """A lease's life: forwards only, but that a paused one begins again."""

    RESOLVING = "resolving"
    WAITING = "waiting"  # for bytes, or for memory
    COPYING = "copying"  # has its pages: it pins
    READY = "ready"  # pins
    PAUSED = "paused"  # holds nothing, but remembers its versions
    FAILED = "failed"
    RELEASED = "released"


@dataclass(eq=False, slots=True)
class Ask:
    """A request to the host; `number` is the host's, and `answered` that it holds what was asked for."""

    number: int = 0
    answered: bool = False


@dataclass(eq=False, slots=True)
class Hold:
    """A fetch of the host that `left` copies still read from; the last one to land releases it."""

    fetch: Ask
    left: int


class Load(NamedTuple):
    """How an entry's bytes get into VRAM: the image, and who holds it."""

    image: Image
    hold: Hold


@dataclass(eq=False, slots=True)
class Entry:
    """One version that somebody wants or that is still here.

    Attributes:
        verified: the claims (adapter and number) under which the host has verified it. The bytes are the
            same under each, but each has its own admission statement: a claim counts only once checked, and
            until trust changes.
        checks: what the host was asked to verify; held as long as a lease waits.
        facts: manifest and layout, once the first claim was verified; `rank`: the largest of its modules.
        claimed: room in VRAM is its own: pages by number, and a slot. `resident` follows with the bytes.
        delivery: the fetch that brings the bytes to claimed room.
        resident: its pages and slot; `copied` says that the copy's event has completed.
        load: the copy that is on its way.
        cold: the image as it was when it was brought, if a lease was parked after that.
        copied_by: marks of the copies that filled the pages.
        joined: the compute stream that already waits for `copied_by`.
        readers: marks of the steps that read the pages.
        waiting, holders: live leases without and with a claim on its pages, by sequence number.
        tickets: steps in flight that read it.
        dead: it is found no more, and goes for `cause` as soon as nothing is in flight.
        scrubbing, scrubbed: if it was revoked, that its pages are going to be zeroed, or are enqueued to be.
        used: since it has its room, a lease was on it that was no prefetch.
        last_used: tick.
        spot: its place among those that nobody holds (`idle`): the tick by which it is listed, and a number.
    """

    key: VersionKey
    verified: dict[Claim, Verified] = field(default_factory=dict)
    checks: dict[Claim, Ask] = field(default_factory=dict)
    facts: Facts | None = None
    rank: int = 0
    claimed: bool = False
    delivery: Ask | None = None
    resident: Resident | None = None
    load: Load | None = None
    cold: Image | None = None
    copied: bool = False
    copied_by: Fence = OPEN
    joined: object = None
    readers: Readers = field(default_factory=Readers)
    waiting: dict[int, LeaseRecord] = field(default_factory=dict)
    holders: dict[int, LeaseRecord] = field(default_factory=dict)
    tickets: int = 0
    dead: bool = False
    cause: Cause = Cause.RELOAD
    scrubbing: bool = False
    scrubbed: bool = False
    used: bool = False
    last_used: int = 0
    spot: tuple[int, int] | None = None

    @property
    def place(self) -> Place:
        """As far as the cache knows; what is absent here may be in host memory."""
        if self.claimed:
            return Place.RESIDENT if self.copied else Place.STAGING
        return Place.ABSENT

    @property
    def wanted(self) -> bool:
        """Whether a live lease is on it."""
        return bool(self.waiting or self.holders)

    @property
    def in_flight(self) -> bool:
        """Whether a copy or a step has to do with it."""
        return self.tickets > 0 or (self.resident is not None and not self.copied)

    @property
    def pages(self) -> int:
        assert self.facts is not None
        return self.facts.layout.n_pages

    @property
    def kept(self) -> bool:
        """Whether a pin or a route is on it."""
        return any(r.purpose is Purpose.KEEP for r in (*self.holders.values(), *self.waiting.values()))

    def spared_for(self, record: LeaseRecord) -> bool:
        """Whether a lease that goes before `record`, or `record` itself, wants it."""
        return any(rank(waiting) <= rank(record) for waiting in self.waiting.values())


@dataclass(eq=False, slots=True)
class LeaseRecord:
    """One lease. `seq` counts acquires: smaller is older.

    Attributes:
        tenant, base: whose it is, and the base it was asked for.
        asked: as the caller named it.
        priority: the higher is served first among those that wait.
        resolved: the version of each of `asked`; empty until resolved.
        components: of these, normalised; None until resolved.
        entries: one a component.
        claims: what must be verified for it: (entry, what it was found as), at least one an entry.
        unseen: entries of which it is not known yet where they were found.
        lookup: the host's request while REFs are being resolved.
        fetch: the host's request for what is not in VRAM, and `images` what it brought.
        parked: the bytes were there but the room was not: room comes first from now on.
        residents: (resident, weight) a component, once ready.
        problems: why it failed.
        brought: of one that ends by itself: it ended well.
    """

    seq: int
    tenant: str
    base: BasePin
    asked: tuple[Asked, ...]
    priority: int = 0
    purpose: Purpose = Purpose.USE
    state: LeaseState = LeaseState.RESOLVING
    resolved: tuple[Resolved, ...] = ()
    components: tuple[Component, ...] | None = None
    entries: tuple[Entry, ...] = ()
    claims: tuple[tuple[Entry, Resolved], ...] = ()
    unseen: set[Entry] = field(default_factory=set)
    lookup: Ask | None = None
    fetch: Ask | None = None
    images: dict[Entry, Image] = field(default_factory=dict)
    parked: bool = False
    residents: tuple[tuple[Resident, float], ...] = ()
    problems: tuple[Problem, ...] = ()
    brought: bool = False

    @property
    def number(self) -> int:
        return self.seq

    @property
    def live(self) -> bool:
        return self.state is not LeaseState.FAILED and self.state is not LeaseState.RELEASED

    @property
    def queued(self) -> bool:
        """It waits for others or for memory."""
        return self.state is LeaseState.RESOLVING or self.state is LeaseState.WAITING

    @property
    def settled(self) -> bool:
        """Nothing more will happen to it by itself."""
        return self.state in {LeaseState.READY, LeaseState.PAUSED, LeaseState.FAILED, LeaseState.RELEASED}

    @property
    def missing(self) -> list[Entry]:
        """Those of its entries that have no room in VRAM."""
        return [entry for entry in self.entries if not entry.claimed]

    def forget_hold(self) -> None:
        """What it was on is others' now; `resolved` and `components` stay."""
        self.entries, self.claims, self.unseen, self.residents = (), (), set(), ()
        self.lookup, self.parked = None, False
