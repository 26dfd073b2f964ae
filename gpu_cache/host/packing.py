"""Has verified versions packed into the slab: who gets memory next, and what becomes of the jobs.

Memory for all versions of a fetch at once or for none: a fetch that waits holds none, so fetches cannot block each
other by holding halves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from adapterd.gpu_cache.host.interface import Failure, Image, Origin, Stage
from adapterd.gpu_cache.host.jobs import Answers, LoaderJobs
from adapterd.gpu_cache.host.loading import Fill
from adapterd.gpu_cache.host.meters import Meters
from adapterd.gpu_cache.host.records import Fetching, HostEntry
from adapterd.gpu_cache.host.tier import HostTier
from adapterd.gpu_cache.lines import Lines
from adapterd.loader.errors import Code, reject

Packed = tuple[Fill, float]
"""What became of it, and the seconds of packing."""


class PackerOwner(Protocol):
    """Whom the packer tells, with the host's lock held."""

    def refused(self, request: Fetching, failure: Failure) -> None: ...

    def begin(self, request: Fetching) -> None:
        """From the start, with what is not verified any more."""
        ...

    def broken(self, entry: HostEntry) -> None:
        """Its books are in disorder."""
        ...

    def tidy(self, entry: HostEntry) -> None: ...


class Packer:
    """Methods need the host's lock, but for the jobs' work."""

    def __init__(
        self,
        tier: HostTier,
        jobs: LoaderJobs,
        answers: Answers,
        meters: Meters,
        clock: Callable[[], float],
        owner: PackerOwner,
    ) -> None:
        self._tier, self._jobs, self._answers, self._meters = tier, jobs, answers, meters
        self._clock, self._owner = clock, owner
        self._lines: Lines[Fetching] = Lines()

    def line_up(self, request: Fetching) -> None:
        """All its versions are verified: from now on it waits for memory, if it needs any."""
        pages = sum(entry.size for entry in dict.fromkeys(request.entries))
        ceiling = self._tier.budget.ceiling(request.tenant)
        if pages > ceiling:
            self._owner.refused(request, _too_large(request, pages, ceiling, self._tier.budget.page_bytes))
        elif all(entry.pages is not None for entry in request.entries):
            self._grant(request)
        else:
            self._lines.add(request)

    def hold(self, request: Fetching) -> tuple[Image, ...]:
        """Its versions are all in the slab: it is granted what is there."""
        for entry in request.entries:
            entry.users[request.number] = entry.holders[request.number] = request
        return tuple(self._image(entry, packed_for=False) for entry in request.entries)

    def leave(self, request: Fetching) -> None:
        """It wants nothing any more: its images are free to go."""
        self._lines.remove(request)
        for entry in request.entries:
            entry.holders.pop(request.number, None)

    def serve(self) -> None:
        """Something came free: memory for those who wait, in their order."""
        self._lines.serve(self._attempt)

    def _attempt(self, request: Fetching) -> bool:
        wanted = dict.fromkeys(request.entries)  # in a fixed order
        new = [entry for entry in wanted if entry.pages is None]
        dropped = self._tier.make_room(request.tenant, sum(entry.size for entry in new), wanted)
        if dropped is None:
            return False
        for entry in new:
            self._tier.take(entry)
            self._fill(entry)
        self._grant(request)
        for entry in new:
            self._grant_others(entry)
        for entry in dropped:
            self._owner.tidy(entry)
        return True

    def _grant_others(self, entry: HostEntry) -> None:
        """Who waited for these pages only needs no memory now."""
        for other in list(entry.users.values()):
            if not isinstance(other, Fetching) or other.unverified:
                continue
            if all(e.pages is not None for e in other.entries):
                self._grant(other)

    def _grant(self, request: Fetching) -> None:
        self._lines.remove(request)
        for entry in request.entries:
            entry.holders[request.number] = request
            if not entry.filled:
                request.packed_for.add(entry)
        self._answer(request)

    def _answer(self, request: Fetching) -> None:
        if all(entry.filled for entry in request.entries):
            images = tuple(self._image(entry, entry in request.packed_for) for entry in request.entries)
            self._answers.add(request, images)

    def _image(self, entry: HostEntry, packed_for: bool) -> Image:
        assert entry.prepared is not None
        assert entry.pages is not None
        origin, seconds = (entry.origin, entry.seconds) if packed_for else (Origin.HOST, {})
        manifest, layout = entry.prepared.manifest, entry.prepared.layout
        return Image(entry.key, self._tier.slab, manifest, layout, entry.pages, origin, seconds)

    def _fill(self, entry: HostEntry) -> None:
        prepared, pages = entry.prepared, entry.pages
        assert prepared is not None
        assert pages is not None

        def work() -> Packed | None:
            if not entry.holders:
                return None  # nobody waits for it any more
            began = self._clock()
            meter = self._meters.begin(entry.key, Stage.PACK, prepared.layout.nbytes)
            try:
                fill = prepared.fill(self._tier.memory(pages))
            finally:
                self._meters.end(meter)
            return fill, self._clock() - began

        entry.filling = True
        self._jobs.start(entry.key.tenant, work, partial(self._filled, entry), partial(self._owner.broken, entry))

    def _filled(self, entry: HostEntry, outcome: Packed | Failure | None) -> None:
        if outcome is None and entry.holders:  # given up, and wanted again
            self._fill(entry)
            return
        entry.filling = False
        if outcome is None:
            self._tier.drop(entry)
        elif isinstance(outcome, Failure):
            self._spoilt(entry, outcome)
        else:
            self._keep(entry, *outcome)
        self._owner.tidy(entry)
        self.serve()

    def _keep(self, entry: HostEntry, fill: Fill, seconds: float) -> None:
        """`verify_seconds` is there for the first image since the version was verified only."""
        first, entry.seconds = entry.verify_seconds, {"pack": seconds}
        if first is not None:
            entry.seconds["verify"] = first
        entry.origin = Origin.DISK if first is None and fill.origin is Origin.SOURCE else fill.origin
        if fill.keep is not None:  # behind the loads that wait
            self._jobs.start(entry.key.tenant, fill.keep, lambda _: None, lambda: None)
        entry.verify_seconds = None
        self._tier.fill(entry)
        for request in list(entry.holders.values()):
            self._answer(request)

    def _spoilt(self, entry: HostEntry, failure: Failure) -> None:
        """Bytes that do not hold fail all who wait for them; the next request verifies everything anew.

        Files that have gone meanwhile are no reason to fail: a store of limited size gives up what it likes.
        """
        gone = failure.problems[0].code is Code.STORAGE_UNAVAILABLE
        self._tier.drop(entry)
        entry.prepared = None
        entry.verified.clear()
        for request in list(entry.users.values()):
            if not isinstance(request, Fetching):
                continue
            if gone and not request.again:
                self.leave(request)
                request.again = True
                self._owner.begin(request)
            else:
                self._owner.refused(request, failure)


def _too_large(request: Fetching, pages: int, ceiling: int, size: int) -> Failure:
    named = " + ".join(f"sha256:{entry.key.digest}" for entry in request.entries)
    problem = reject(
        Code.BUDGET_EXCEEDED, named,
        f"needs {pages * size} bytes ({pages} pages) of host; "
        f"tenant {request.tenant} can have {ceiling * size} ({ceiling} pages)",
        "Raise host_bytes or the tenant's maximum.",
    )  # fmt: skip
    return Failure((problem,))
