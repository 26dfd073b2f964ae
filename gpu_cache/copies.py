"""Copies from host memory into the arena: queued with their fences, issued in pieces, watched by events.

There are two copy streams, which fill the link better than one. Each piece of a transfer is cut in halves,
one batch a stream (a long piece behind a few pages that go ahead), unless its pages are neighbours on both sides.
So two transfers that write the same page one after the other may do it in different streams, and nothing but the
fence of the page orders them: it names the page's last readers and its last writers, and each stream waits for all
of it before its first byte of the transfer. What scrubs a page is enqueued in the stream that fills it, in front of
the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from threading import Condition
from typing import TYPE_CHECKING

from adapterd.gpu_cache.copy_turns import CopyTurns
from adapterd.gpu_cache.device import Device, Event, Run, Stream
from adapterd.gpu_cache.fences import Fence
from adapterd.gpu_cache.pages import Allotment, halved, runs
from adapterd.gpu_cache.records import Entry
from adapterd.loader.errors import AdapterdError, Problem

if TYPE_CHECKING:
    import torch

COPY_STREAMS = 2
MANY_PAGES, FIRST_PAGES = 16, 8
"""Of more than so many pages so many go ahead. Without that, or with a third piece between, it takes longer."""


@dataclass(eq=False, slots=True)
class Transfer:
    """One adapter on its way, from pages `sources` of `slab` to those of `allotment`.

    `issued` counts pages whose copies are enqueued, the first of them at `begun` (seconds of the queue's
    clock); `stopped`: no more of them will be. `copied_by` stands behind the last of them, in every stream
    that copied some; None until then.
    """

    entry: Entry
    slab: torch.Tensor
    sources: tuple[int, ...]
    allotment: Allotment
    issued: int = 0
    stopped: bool = False
    begun: float = 0.0
    used: set[Stream] = field(default_factory=set)
    copied_by: Fence | None = None

    @property
    def tenant(self) -> str:
        return self.entry.key.tenant


@dataclass(frozen=True, slots=True)
class Landed:
    """A transfer whose copies have completed, noticed `seconds` after the first of them was enqueued."""

    entry: Entry
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Lost:
    """A transfer that the device refused."""

    entry: Entry
    problems: tuple[Problem, ...]


class CopyQueue:
    """Transfers in turns (`copy_turns`). Methods need the cache's lock, but for `issue`."""

    def __init__(
        self,
        device: Device,
        arena: torch.Tensor,
        page_bytes: int,
        lock: Condition,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device, self._arena, self._page_bytes = device, arena, page_bytes
        self._lock, self._clock = lock, clock
        self._queued: CopyTurns[Transfer] = CopyTurns()
        self._flying: list[Transfer] = []
        self._lost: list[Lost] = []
        self._pace = inf  # seconds a byte, of the quickest transfer yet
        self._issuing = False
        self._turn = COPY_STREAMS - 1  # whose stream took the last transfer in one piece
        self._streams: tuple[Stream, ...] = ()

    def open(self) -> None:
        self._streams = tuple(self._device.new_stream() for _ in range(COPY_STREAMS))

    @property
    def busy(self) -> bool:
        """Whether a copy is queued, being enqueued, or not known to have completed."""
        return bool(self._queued or self._issuing or self._flying)

    @property
    def waiting(self) -> bool:
        """Whether anything is left to enqueue. May be asked without the lock."""
        return bool(self._queued)

    @property
    def news(self) -> bool:
        """Whether `landed` or `lost` may have something to say."""
        return bool(self._flying or self._lost)

    def add(self, transfer: Transfer) -> None:
        self._queued.add(transfer)

    def stop(self, entry: Entry) -> None:
        """No further page of it is enqueued. It lands as if all were there: nobody may read it."""
        for transfer in self._queued:
            transfer.stopped = transfer.stopped or transfer.entry is entry

    def landed(self) -> list[Landed]:
        """Whose copies have completed since the last call."""
        found: list[Landed] = []
        for transfer in list(self._flying):
            assert transfer.copied_by is not None
            try:
                done = transfer.copied_by.passed()
            except AdapterdError as failure:
                self._lose(transfer, failure)
                continue
            if done:
                self._flying.remove(transfer)
                nbytes, seconds = len(transfer.sources) * self._page_bytes, self._clock() - transfer.begun
                found.append(Landed(transfer.entry, nbytes, seconds))
                if not transfer.stopped:
                    self._pace = min(self._pace, seconds / nbytes)
        return found

    def soonest(self) -> float:
        """Seconds in which none can land, were the next as quick as the quickest yet. 0 if that is not known."""
        if self._queued or not self._flying or self._pace == inf:
            return 0.0
        ends = [transfer.begun + len(transfer.sources) * self._page_bytes * self._pace for transfer in self._flying]
        return max(0.0, min(ends) - self._clock())

    def lost(self) -> list[Lost]:
        """What the device has refused since the last call."""
        found, self._lost = self._lost, []
        return found

    def issue(self, max_pages: int | None) -> None:
        """Enqueues queued copies, at most `max_pages` pages of them.

        Without the lock. One thread at a time: while one is at it, others return, because the marks of a
        transfer must stand behind all of its pieces.
        """
        with self._lock:
            if self._issuing or not self._queued:
                return
            self._issuing = True
        try:
            while max_pages is None or max_pages > 0:
                issued = self._issue_next(max_pages)
                if issued is None:
                    return
                max_pages = None if max_pages is None else max_pages - issued
        finally:
            with self._lock:
                self._issuing = False

    def _issue_next(self, max_pages: int | None) -> int | None:
        """One piece of the transfer whose turn it is; how many pages, None if there is none."""
        with self._lock:
            transfer = self._queued.next()
            if transfer is None:
                return None
            begin = transfer.issued
            total = begin if transfer.stopped else len(transfer.sources)
            end = total if max_pages is None else min(total, begin + self._queued.piece(max_pages))
            self._queued.given(transfer, end - begin)
        try:
            if begin == 0:
                transfer.begun = self._clock()
            self._enqueue(transfer, begin, end)
            marks = self._marks(transfer) if end == total else None
        except AdapterdError as failure:
            with self._lock:
                self._lose(transfer, failure)
            return end - begin
        with self._lock:
            transfer.issued = end
            if marks is not None:
                transfer.copied_by = transfer.entry.copied_by = marks
                self._queued.remove(transfer)
                self._flying.append(transfer)
        return end - begin

    def _enqueue(self, transfer: Transfer, begin: int, end: int) -> None:
        """Pages `begin` to `end`. Of many the first few go ahead: the link is busy while the rest is put together."""
        if end - begin > MANY_PAGES:
            self._enqueue_halves(transfer, begin, begin + FIRST_PAGES)
            begin += FIRST_PAGES
        if begin < end:
            self._enqueue_halves(transfer, begin, end)

    def _enqueue_halves(self, transfer: Transfer, begin: int, end: int) -> None:
        """At most one batch a stream. Many runs fill the link best in halves; a single one does so alone, and streams
        take turns with those.
        """
        whole = runs(transfer.sources[begin:end], transfer.allotment.pages[begin:end])
        if len(whole) == 1:
            self._turn = (self._turn + 1) % COPY_STREAMS
            self._fill(self._opened_streams[self._turn], transfer, begin, end, whole)
            return
        cut = begin + (end - begin + 1) // 2
        halves = halved(whole, cut - begin)
        for stream, first, last, pieces in zip(self._opened_streams, (begin, cut), (cut, end), halves, strict=True):
            self._fill(stream, transfer, first, last, pieces)

    def _fill(self, stream: Stream, transfer: Transfer, first: int, last: int, pieces: Sequence[Run]) -> None:
        if stream not in transfer.used:
            self._enter(stream, transfer)
        targets, scrub = transfer.allotment.pages[first:last], transfer.allotment.scrub
        for _, page, length in _neighbours(targets, scrub) if scrub else ():
            self._device.zero(stream, self._arena[page * self._page_bytes : (page + length) * self._page_bytes])
        self._device.copy_runs(stream, self._arena, transfer.slab, pieces, self._page_bytes)

    def _enter(self, stream: Stream, transfer: Transfer) -> None:
        """The fence is waited for even if its marks are passed already: stream order is the guarantee (I13)."""
        for event in transfer.allotment.fence.events:
            self._device.wait(stream, event)
        transfer.used.add(stream)

    def _marks(self, transfer: Transfer) -> Fence:
        """One in each stream that copied some of it. What was stopped waited for nobody, so its fence goes on."""
        events: list[Event] = [self._device.record(s) for s in self._opened_streams if s in transfer.used]
        fence = Fence(tuple(events))
        return Fence.merged((transfer.allotment.fence, fence)) if transfer.stopped else fence

    def _lose(self, transfer: Transfer, failure: AdapterdError) -> None:
        if transfer in self._queued:
            self._queued.remove(transfer)
        else:
            self._flying.remove(transfer)
        self._lost.append(Lost(transfer.entry, failure.problems))

    @property
    def _opened_streams(self) -> tuple[Stream, ...]:
        assert self._streams, "the cache is not open"
        return self._streams


def _neighbours(pages: Sequence[int], chosen: Sequence[int]) -> list[tuple[int, int, int]]:
    """Those of `pages` that are in `chosen`, as runs."""
    wanted = set(chosen).intersection(pages)
    ordered = [page for page in pages if page in wanted]
    return runs(ordered, ordered)
