"""The port between a cache and the host memory behind it.

The cache asks, and is told later: every call returns at once and does bookkeeping only, and its answer comes
by `settle`, exactly once, from another thread and with none of the host's locks held. (`settle` may call the
host again; where Ctrl-C stopped it, it is called once more.) There are two hosts, which pass one contract suite:
`host_cache.HostCache` in the cache's own process, and `process.client.HostClient`, which speaks to a loader process
that runs a `HostCache` for all workers of the machine.

What a request holds is given back by `release`, which also cancels what has not come yet. An image stays
where it is, and is not overwritten, until every request that was answered with it is released; what `verify`
found is known at least as long as its request is held. A request that failed holds nothing, nor does `resolve`.

A request that is not answered yet counts as waiting. A tenant with too many of them is refused (QUEUE_FULL),
by `settle` like any other failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from adapterd.loader.errors import Code, Problem
from adapterd.loader.identity import Ref, VersionKey
from adapterd.loader.layout import Layout
from adapterd.loader.manifest import Manifest

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.sources import Resolved

T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a request ended, when it did not end well. Not empty."""

    problems: tuple[Problem, ...]

    @property
    def cancelled(self) -> bool:
        return self.problems[0].code is Code.LEASE_CANCELLED


class Origin(StrEnum):
    """Where the bytes of an image were when they were asked for."""

    HOST = "host"  # packed in the slab
    PACKED = "packed"  # on this machine's disk, in packed form
    DISK = "disk"  # on this machine's disk, verified
    SOURCE = "source"  # not here: fetched


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a version once it is verified and on the local disk: enough to admit it, no bytes yet.

    `publisher` is the key id of who signed it, as claimed and verified; None if nobody did.
    """

    manifest: Manifest
    layout: Layout
    publisher: str | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """One version's packed bytes in a slab.

    Attributes:
        key: what it is.
        slab: the memory that `pages` count in: one object for the life of a host, or of one run of a loader process.
        pages: slab pages; page i of the packed form is bytes [pages[i], pages[i] + 1) × `layout.page_bytes` of it.
        origin: where the bytes came from.
        seconds: how long each stage of bringing them took (`verify`, `pack`); empty for `Origin.HOST`.
    """

    key: VersionKey
    slab: Slab
    manifest: Manifest
    layout: Layout
    pages: tuple[int, ...]
    origin: Origin
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AtHand:
    """What a host had of some versions, in the order asked, held by `request` as by an answered fetch.

    `facts` and `images` are of `resolved`, verified by what was trusted after `trust_changes` changes.
    """

    request: int
    resolved: tuple[Resolved, ...]
    facts: tuple[Facts, ...]
    images: tuple[Image, ...]
    trust_changes: int


@dataclass(frozen=True, slots=True)
class HostUsage:
    """What is in host memory, as of the host's last word.

    Attributes:
        tenants: bytes in use, by tenant; whole pages.
        free_bytes: of the slab.
        images: the versions whose packed bytes are there, and how many bytes each takes.
    """

    tenants: Mapping[str, int]
    free_bytes: int
    images: Mapping[VersionKey, int]


class Stage(StrEnum):
    """What a load that runs is at."""

    VERIFY = "verify"  # files come from the source or the disk, are hashed and checked
    PACK = "pack"  # into the slab


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is.

    Attributes:
        done: bytes, of the files while they are verified; what is packed is not counted before its end.
        total: bytes; 0 as long as it is not known.
    """

    stage: Stage
    done: int
    total: int


class Slab(Protocol):
    """One stretch of host memory, made of pages. Compared by identity."""

    @property
    def memory(self) -> Any:
        """A buffer over all of it (read-only for a client of a loader process)."""
        ...

    @property
    def page_bytes(self) -> int: ...


Settle = Callable[[T_contra | Failure], None]


class Host(Protocol):
    """Verified bytes in host memory, budgeted by tenant. Thread-safe; nothing here blocks or raises.

    Requests are numbered by the host; a number is never used twice.
    """

    @property
    def slab(self) -> Slab:
        """What images are in from now on. A loader process that was started anew has another one."""
        ...

    @property
    def trust_changes(self) -> int:
        """Grows when trust changes: what `verify` found to hold before has to be verified again."""
        ...

    def resolve(self, asked: Sequence[Ref], tenant: str, settle: Settle[tuple[Resolved, ...]]) -> int:
        """Which version every REF means now, in order. NOT_FOUND for another tenant's and for unknown ones alike.

        A REF that names a digest whose verified bytes are in the slab is answered without asking the source.
        """
        ...

    def verify(self, resolved: Resolved, tenant: str, settle: Settle[Facts]) -> int:
        """Has the version brought to the local disk and verified, by what is trusted now or later.

        Equal requests share the work. A claim (adapter name, version number) that does not hold fails only those
        who made it.
        """
        ...

    def fetch(
        self, wanted: Sequence[Resolved], tenant: str, settle: Settle[tuple[Image, ...]], *, priority: int = 0
    ) -> int:
        """Has versions packed into the slab: memory for all of them at once, or none yet.

        What is not verified is verified first. Among requests that wait for memory the higher priority goes first,
        then the older; one that waits holds up the ones of its tenant behind it that need memory, too. Bytes that
        do not hold fail all who wait for them, and the next request verifies and hashes them anew.
        BUDGET_EXCEEDED if they can never fit together.
        """
        ...

    def at_hand(self, wanted: Sequence[Ref] | Sequence[Resolved], tenant: str) -> AtHand | None:
        """What REFs that name a digest, or versions, are, if all of it is in the slab and known to be verified by what
        is trusted now: what `resolve`, `verify` and `fetch` would say, at once. Waits for nothing, so no bound on what
        waits holds it up. None says that it has to be asked for, and not why; a host may always say so.
        """
        ...

    def deliver(self, most: int | None = None) -> None:
        """Says in this thread, which holds no lock, what is known by now but not said yet. Without it another thread
        says it a little later. Raises nothing but an interrupt of this thread, after which the answer is said again.

        Args:
            most: answers, behind a step's launch: what comes while steps go on may be kept for the next one, for some
                ms at most. None: what is kept for no step.
        """
        ...

    def release(self, request: int) -> None:
        """Gives back what the request holds, or cancels it; its `settle` may still come, as LEASE_CANCELLED or not
        at all. Idempotent."""
        ...

    def forget(self, key: VersionKey) -> None:
        """Drops the version's image as soon as nobody holds it, and finds it no more (revocation)."""
        ...

    def rebase(self, base: BaseSpec) -> None:
        """The base model was reloaded: from now on versions are verified against `base`, which may be an equal one.

        Images for the old one are found no more, as with `forget`, unless other workers of this host serve it.
        """
        ...

    def usage(self) -> HostUsage:
        """Never asks anybody: in a client of a loader process it may be a little old."""
        ...

    def loading(self) -> Mapping[VersionKey, Progress]:
        """The loads that run, of whatever base. Never asks anybody either."""
        ...

    def close(self, timeout: float) -> None:
        """Fails what is pending (CACHE_CLOSED; `settle` comes in this thread), and waits for what runs. What is asked
        afterwards fails alike.

        Args:
            timeout: seconds to wait at most. Idempotent.
        """
        ...
