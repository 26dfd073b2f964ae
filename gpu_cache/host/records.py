"""The host's own books: an entry a version and packed form, a record a request. Guarded by the host's lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adapterd.gpu_cache.host.interface import Facts, Origin
from adapterd.gpu_cache.host.loading import Dtypes, Prepared, Serving
from adapterd.loader.identity import Ref, VersionKey

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved

Claim = tuple[str, int]
"""Adapter and version number, as a source's answer claims them."""


def claim_of(resolved: Resolved) -> Claim:
    return resolved.adapter, resolved.version_number


@dataclass(eq=False, slots=True)
class Request:
    """One request.

    Attributes:
        number: smaller is older.
        answer: the caller's `settle`; None once the answer is on its way, or the request was released.
    """

    number: int
    tenant: str
    answer: Callable[[Any], None] | None

    @property
    def waits(self) -> bool:
        return self.answer is not None


@dataclass(eq=False, slots=True)
class Resolving(Request):
    asked: tuple[Ref, ...]


@dataclass(eq=False, slots=True)
class Verifying(Request):
    entry: HostEntry
    wanted: Resolved


@dataclass(eq=False, slots=True)
class Fetching(Request):
    """A fetch.

    Attributes:
        entries: in the order asked, some perhaps more than once.
        wanted: what each was asked for as.
        unverified: claims that are still being verified.
        packed_for: entries whose bytes were not in the slab when they were asked for.
        again: it was begun a second time, because verified files had gone from the disk.
    """

    priority: int
    entries: tuple[HostEntry, ...]
    wanted: tuple[Resolved, ...]
    unverified: int = 0
    packed_for: set[HostEntry] = field(default_factory=set)
    again: bool = False


@dataclass(eq=False, slots=True)
class Check:
    """A claim that a loader job is verifying.

    Attributes:
        waiting: for each request that waits for it, how often trust had changed when it asked.
        given_up: the job was told that nobody waits any more.
    """

    resolved: Resolved
    given_up: bool = False
    waiting: dict[int, tuple[Verifying | Fetching, int]] = field(default_factory=dict)

    def cancelled(self) -> bool:
        """For the job, without the lock."""
        self.given_up = self.given_up or not self.waiting
        return not self.waiting


@dataclass(frozen=True, slots=True)
class Verified:
    """A claim that the loader found to hold, when trust had changed `trust_changes` times; who signed it."""

    resolved: Resolved
    trust_changes: int
    publisher: str | None = None


EntryKey = tuple[VersionKey, Dtypes, str]


@dataclass(eq=False, slots=True)
class HostEntry:
    """One version in one packed form.

    Attributes:
        verified: the claims (adapter and number) under which it was verified. The bytes are the same under each,
            but each has its own admission statement: a claim counts only once checked, and until trust changes.
        checks: the claims that a loader job is verifying.
        prepared: manifest, layout and a way to pack it, once the first claim was verified.
        pages: of the slab; `filling` while a loader job packs into them, `filled` once the bytes are in and hold.
        verify_seconds: how long that took, until an image is made.
        origin, seconds: of the present image, as in `Image`, for those who waited for it.
        users: requests that want it, answered ones included, until they are released.
        holders: those of them whose image it is.
        forgotten: it is found no more, and goes with its last holder.
        last_used: tick.
    """

    key: VersionKey
    serving: Serving
    verified: dict[Claim, Verified] = field(default_factory=dict)
    checks: dict[Claim, Check] = field(default_factory=dict)
    prepared: Prepared | None = None
    verify_seconds: float | None = None
    pages: tuple[int, ...] | None = None
    filling: bool = False
    filled: bool = False
    origin: Origin = Origin.DISK
    seconds: dict[str, float] = field(default_factory=dict)
    users: dict[int, Verifying | Fetching] = field(default_factory=dict)
    holders: dict[int, Fetching] = field(default_factory=dict)
    forgotten: bool = False
    last_used: int = 0

    @property
    def size(self) -> int:
        """Pages."""
        assert self.prepared is not None
        return self.prepared.layout.n_pages

    def facts(self, resolved: Resolved) -> Facts:
        """What is known of it as `resolved`, which was verified."""
        assert self.prepared is not None
        return Facts(self.prepared.manifest, self.prepared.layout, self.verified[claim_of(resolved)].publisher)

    @property
    def idle(self) -> bool:
        """Nobody wants it, and it is not being verified."""
        return not (self.users or self.checks)
