"""A step in flight: which adapters it reads, until its mark stands in the compute stream."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from adapterd.gpu_cache.device import Stream
from adapterd.gpu_cache.records import Entry


class StepBooks(Protocol):
    """What a ticket asks of its cache."""

    def end_step(self, ticket: StepTicket) -> None: ...


class StepTicket:
    """Made by `AdapterCache.begin_step`. Pins what the step reads until `end`, whatever becomes of the leases."""

    def __init__(self, books: StepBooks, stream: Stream, entries: tuple[Entry, ...]) -> None:
        self._books = books
        self.stream = stream
        self.entries = entries
        self._ended = False

    def end(self) -> None:
        """Call it when everything that the step reads adapters with is enqueued. Idempotent; also on failure.

        Records one event in the compute stream, and issues queued copies behind the step's launch.
        """
        if not self._ended:
            self._ended = True
            self._books.end_step(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self.end()
