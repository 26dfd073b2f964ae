"""Copies from the host slab into the arena: queued with their fences, issued in pieces, watched by events.

There is one copy stream. So copies into the same page are ordered by the stream itself, and a fence has to
name the readers of a page only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING

from adapterd.gpu_cache.device import Device, Event, Stream
from adapterd.gpu_cache.pages import Allotment, runs
from adapterd.gpu_cache.records import Entry
from adapterd.loader.errors import AdapterdError, Problem

if TYPE_CHECKING:
    import torch


@dataclass(eq=False, slots=True)
class Transfer:
    """One adapter on its way, from pages `sources` of the slab to those of `allotment`.

    `issued` counts pages whose copies are enqueued; `event` stands behind the last of them.
    """

    entry: Entry
    sources: tuple[int, ...]
    allotment: Allotment
    issued: int = 0
    event: Event | None = None

    @property
    def whole(self) -> bool:
        return self.issued == len(self.sources)


@dataclass(frozen=True, slots=True)
class Lost:
    """A transfer that the device refused."""

    entry: Entry
    problems: tuple[Problem, ...]


class CopyQueue:
    """Transfers in order. Methods need the cache's lock, but for `issue`."""

    def __init__(
        self, device: Device, arena: torch.Tensor, slab: torch.Tensor, page_bytes: int, lock: Condition
    ) -> None:
        self._device, self._arena, self._slab, self._page_bytes = device, arena, slab, page_bytes
        self._lock = lock
        self._queued: deque[Transfer] = deque()
        self._flying: list[Transfer] = []
        self._lost: list[Lost] = []
        self._issuing = False
        self._stream: Stream | None = None

    def open(self) -> None:
        self._stream = self._device.new_stream()

    @property
    def busy(self) -> bool:
        """Whether a copy is queued, being enqueued, or not known to have completed."""
        return bool(self._queued or self._issuing or self._flying)

    def add(self, transfer: Transfer) -> None:
        self._queued.append(transfer)

    def landed(self) -> list[Entry]:
        """Whose copies have completed since the last call."""
        found: list[Entry] = []
        for transfer in list(self._flying):
            try:
                done = transfer.event is not None and transfer.event.done()
            except AdapterdError as failure:
                self._lose(transfer, failure)
                continue
            if done:
                self._flying.remove(transfer)
                found.append(transfer.entry)
        return found

    def lost(self) -> list[Lost]:
        """What the device has refused since the last call."""
        found, self._lost = self._lost, []
        return found

    def issue(self, max_pages: int | None) -> None:
        """Enqueues queued copies, at most `max_pages` pages of them.

        Without the lock. One thread at a time: while one is at it, others return, because the event of a
        transfer must stand behind all of its pieces.
        """
        with self._lock:
            if self._issuing or not self._queued:
                return
            self._issuing = True
        try:
            while max_pages is None or max_pages > 0:
                issued = self._issue_next(max_pages)
                if not issued:
                    return
                max_pages = None if max_pages is None else max_pages - issued
        finally:
            with self._lock:
                self._issuing = False

    def _issue_next(self, max_pages: int | None) -> int:
        """One piece of the oldest transfer; how many pages, 0 if there is none."""
        with self._lock:
            if not self._queued:
                return 0
            transfer = self._queued[0]
        begin, total = transfer.issued, len(transfer.sources)
        end = total if max_pages is None else min(total, begin + max_pages)
        try:
            self._enqueue(transfer, begin, end)
            event = self._device.record(self._opened_stream) if end == total else None
        except AdapterdError as failure:
            with self._lock:
                self._lose(transfer, failure)
            return end - begin
        with self._lock:
            transfer.issued = end
            if event is not None:
                transfer.event = transfer.entry.copy_event = event
                self._queued.popleft()
                self._flying.append(transfer)
        return end - begin

    def _enqueue(self, transfer: Transfer, begin: int, end: int) -> None:
        """The fence is waited for even if its marks are passed already: stream order is the guarantee (I13)."""
        stream, allotment = self._opened_stream, transfer.allotment
        if begin == 0:
            for event in allotment.fence.events:
                self._device.wait(stream, event)
            for page in allotment.scrub:
                self._device.zero(stream, self._pages(self._arena, page, 1))
        for source, target, length in runs(transfer.sources[begin:end], allotment.pages[begin:end]):
            to, origin = self._pages(self._arena, target, length), self._pages(self._slab, source, length)
            self._device.copy(stream, to, origin)

    def _lose(self, transfer: Transfer, failure: AdapterdError) -> None:
        if transfer in self._queued:
            self._queued.remove(transfer)
        else:
            self._flying.remove(transfer)
        self._lost.append(Lost(transfer.entry, failure.problems))

    @property
    def _opened_stream(self) -> Stream:
        assert self._stream is not None, "the cache is not open"
        return self._stream

    def _pages(self, memory: torch.Tensor, page: int, length: int) -> torch.Tensor:
        return memory[page * self._page_bytes : (page + length) * self._page_bytes]
