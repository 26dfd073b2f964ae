"""Revocation: what may not be served any more, by digest, by name or by the key that signed it.

A revoked version is refused to new leases, its present ones fail, and its bytes go: from host memory as soon as
nobody reads them, from VRAM behind the last step that reads them. There its pages are zeroed at once, not only
when somebody else gets them. A tenant's revocations touch nothing of another tenant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING, Protocol

from adapterd.gpu_cache.device import Device, Event, Stream
from adapterd.gpu_cache.fences import Fence
from adapterd.gpu_cache.host.interface import Host
from adapterd.gpu_cache.host.records import Claim
from adapterd.gpu_cache.lease_book import LeaseBook
from adapterd.gpu_cache.pages import runs
from adapterd.gpu_cache.records import Cause, Entry, LeaseRecord
from adapterd.gpu_cache.residency import Ledger
from adapterd.loader.errors import AdapterdError, Code, Problem, reject
from adapterd.loader.identity import VersionKey

if TYPE_CHECKING:
    import torch

    from adapterd.loader.sources import Resolved


@dataclass(frozen=True, slots=True)
class Revocation:
    """What is revoked in one tenant: whatever fits all that is given.

    Attributes:
        digest: version digest; alone, under whatever name.
        adapter, version_number: a name of the tenant's, all of its versions or one.
        key_id: whatever this publisher's key signed.
        reason: for people; two revocations that differ only here are one.
    """

    tenant: str
    digest: str | None = None
    adapter: str | None = None
    version_number: int | None = None
    key_id: str | None = None
    reason: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.digest is self.adapter is self.key_id is None:
            raise ValueError("a revocation names a digest, an adapter or a key")
        if self.version_number is not None and self.adapter is None:
            raise ValueError("a version number is one of an adapter")

    def fits(self, digest: str, claim: Claim, key_id: str | None) -> bool:
        """Whether it is about this version of its tenant, as claimed, signed with that key."""
        adapter, number = claim
        pairs = (self.digest, digest), (self.adapter, adapter), (self.version_number, number), (self.key_id, key_id)
        return all(named is None or named == found for named, found in pairs)


class Refusals:
    """All revocations, for the life of the cache: some hundred bytes each. Guarded by the cache's lock."""

    def __init__(self) -> None:
        self._by: dict[tuple[str, str], dict[Revocation, Revocation]] = {}

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return bool(self._by)

    def add(self, revocation: Revocation) -> bool:
        """False if it is known."""
        known = self._by.setdefault(_place(revocation), {})
        new = revocation not in known
        known[revocation] = revocation
        return new

    def remove(self, revocation: Revocation) -> bool:
        """False if it is not known."""
        known = self._by.get(_place(revocation), {})
        return known.pop(revocation, None) is not None

    def refusal(self, resolved: Resolved, key_id: str | None) -> Problem | None:
        """Why the version is not served, if it is not."""
        if not self:
            return None
        claim = resolved.adapter, resolved.version_number
        for revocation in self._about(resolved.tenant, (resolved.version_digest, resolved.adapter, key_id)):
            if revocation.fits(resolved.version_digest, claim, key_id):
                return reject(
                    Code.VERSION_REVOKED, str(resolved.ref),
                    f"this version was revoked{': ' * bool(revocation.reason)}{revocation.reason}",
                    "Ask for another version.",
                )  # fmt: skip
        return None

    def _about(self, tenant: str, names: Iterable[str | None]) -> Iterator[Revocation]:
        for name in names:
            if name is not None:
                yield from self._by.get((tenant, name), {}).values()


def _place(revocation: Revocation) -> tuple[str, str]:
    """Under what it is found: a digest, else a name, else a key; all have forms of their own, and `fits` decides."""
    return revocation.tenant, revocation.digest or revocation.adapter or revocation.key_id or ""


class Entries(Protocol):
    """What is asked of a shelf, with the cache's lock held."""

    entries: dict[VersionKey, Entry]

    @property
    def given_up(self) -> list[Entry]: ...

    def bury(self, entry: Entry, cause: Cause) -> None: ...


class RevocationOwner(Protocol):
    """What is asked of a stager, with the cache's lock held."""

    def fail(self, record: LeaseRecord, problems: tuple[Problem, ...]) -> None: ...

    def advance(self) -> None: ...


class Revoker:
    """Carries revocations out. Methods need the cache's lock."""

    def __init__(
        self,
        refusals: Refusals,
        ledger: Ledger,
        book: LeaseBook,
        host: Host,
        shelf: Entries,
        stager: RevocationOwner,
    ) -> None:
        self._refusals, self._ledger, self._book, self._host = refusals, ledger, book, host
        self._shelf, self._stager = shelf, stager

    def revoke(self, revocation: Revocation) -> None:
        """Idempotent."""
        if not self._refusals.add(revocation):
            return
        for record in self._book.live():
            problem = self._problem(record) if record.tenant == revocation.tenant else None
            if problem is not None:
                self._stager.fail(record, (problem,))
        given_up = self._shelf.given_up  # by a reload, say: their pages are to be zeroed, too
        for key in {*self._shelf.entries, *self._host.usage().images, *(entry.key for entry in given_up)}:
            if key.tenant == revocation.tenant:
                self._strike(key, revocation, [entry for entry in given_up if entry.key == key])
        self._stager.advance()

    def _problem(self, record: LeaseRecord) -> Problem | None:
        keys = (VersionKey(record.tenant, record.base, each.version_digest) for each in record.resolved)
        pairs = zip(keys, record.resolved, strict=True)
        found = (self._refusals.refusal(each, self._ledger.publisher(key, each)) for key, each in pairs)
        return next(filter(None, found), None)

    def _strike(self, key: VersionKey, revocation: Revocation, given_up: list[Entry]) -> None:
        """The bytes go when no claim on them is left."""
        claims = dict(self._ledger.claims(key))
        hit = [claim for claim, key_id in claims.items() if revocation.fits(key.digest, claim, key_id)]
        bare = revocation.digest == key.digest and revocation.adapter is revocation.key_id is None
        entry = self._shelf.entries.get(key)
        self._ledger.strike(key, hit)
        for claim in hit if entry is not None else ():
            assert entry is not None
            entry.verified.pop(claim, None)
        if bare or (hit and len(hit) == len(claims)):
            self._host.forget(key)
            for each in given_up if entry is None else [entry, *given_up]:
                self._shelf.bury(each, Cause.REVOKED)


class Scrubber:
    """Zeroes the pages of what was revoked, in a stream of its own, behind their last readers and writers.

    Args:
        lock: the cache's.
        done: called with the lock held once the zeroing of an entry's pages is enqueued and marked.
    """

    def __init__(
        self, device: Device, arena: torch.Tensor, page_bytes: int, lock: Condition, done: Callable[[Entry], None]
    ) -> None:
        self._device, self._arena, self._page_bytes, self._lock = device, arena, page_bytes, lock
        self._done = done
        self._queued: deque[Entry] = deque()
        self._stream: Stream | None = None
        self._issuing = False

    @property
    def waiting(self) -> bool:
        """Whether anything is left to enqueue. May be asked without the lock."""
        return bool(self._queued)

    def add(self, entry: Entry) -> None:
        """With the lock held. Idempotent. Nothing is in flight for the entry, and nobody finds it any more."""
        if not entry.scrubbing:
            entry.scrubbing = True
            self._queued.append(entry)

    def issue(self) -> None:
        """Enqueues what is queued. Without the lock; one thread at a time, others return."""
        entry = self._next(begins=True)
        while entry is not None:
            try:
                mark = self._zero(entry)
            except AdapterdError:
                with self._lock:
                    entry.copied = False  # in flight for ever: what the device refused to zero is not used again
            else:
                with self._lock:
                    assert self._stream is not None
                    entry.readers.note(self._stream, mark)
                    entry.scrubbed = True
                    self._done(entry)
            entry = self._next(begins=False)

    def _next(self, *, begins: bool) -> Entry | None:
        with self._lock:
            if begins and self._issuing:
                return None
            self._issuing = bool(self._queued)
            return self._queued.popleft() if self._queued else None

    def _zero(self, entry: Entry) -> Event:
        assert entry.resident is not None
        if self._stream is None:
            self._stream = self._device.new_stream()
        for event in Fence.merged((entry.copied_by, entry.readers.fence())).events:
            self._device.wait(self._stream, event)
        pages = entry.resident.pages
        for _, first, length in runs(pages, pages):
            self._device.zero(self._stream, self._arena[first * self._page_bytes : (first + length) * self._page_bytes])
        return self._device.record(self._stream)
