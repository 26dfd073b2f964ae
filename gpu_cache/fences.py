"""Fences: after which marks memory may be overwritten (I13).

A step records one event on its compute stream when it ends, and every slot that the step read remembers
it. The copies that filled a page leave marks too. Whoever overwrites those pages makes its stream wait for
all of them: stream order, no host wait.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from adapterd.gpu_cache.device import Event, Stream


class Fence(NamedTuple):
    """The marks that must have been passed before memory is used anew. Empty: nobody uses it."""

    events: tuple[Event, ...] = ()

    @classmethod
    def merged(cls, fences: Collection[Fence]) -> Fence:
        """All marks, each once, in order of appearance. Pages that were freed together share one fence."""
        if len(fences) == 1:
            return next(iter(fences))
        distinct = dict(zip(map(id, fences), fences, strict=True)).values()
        return cls(tuple({id(e): e for fence in distinct for e in fence.events}.values()))

    def passed(self) -> bool:
        """Whether all marks have been passed. Never blocks. Raises Unavailable (DEVICE_ERROR)."""
        return all(event.done() for event in self.events)


OPEN = Fence()


class Readers:
    """Who read a slot last, by stream. In one stream the newest mark stands for all before it."""

    def __init__(self) -> None:
        self._last: dict[Stream, Event] = {}

    def note(self, stream: Stream, event: Event) -> None:
        """Marks must be noted in the order in which they were recorded in their stream."""
        self._last[stream] = event

    def fence(self, behind: Fence = OPEN) -> Fence:
        """All that they have noted, and what they read `behind`."""
        return Fence((*behind.events, *self._last.values())) if self._last else behind
