"""Fences: after which marks memory may be overwritten (I13).

A step records one event on its compute stream when it ends, and every slot that the step read remembers
it. Whoever overwrites those pages makes the copy stream wait for it: stream order, no host wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adapterd.gpu_cache.device import Event, Stream


@dataclass(frozen=True, slots=True)
class Fence:
    """The marks that must have been passed before the memory is written. Empty: nobody reads it."""

    events: tuple[Event, ...] = ()

    @classmethod
    def merged(cls, fences: Iterable[Fence]) -> Fence:
        """All marks, each once, in order of appearance."""
        return cls(tuple({id(e): e for fence in fences for e in fence.events}.values()))


OPEN = Fence()


class Readers:
    """Who read a slot last, by stream. In one stream the newest mark stands for all before it."""

    def __init__(self) -> None:
        self._last: dict[Stream, Event] = {}

    def note(self, stream: Stream, event: Event) -> None:
        """Marks must be noted in the order in which they were recorded in their stream."""
        self._last[stream] = event

    def fence(self) -> Fence:
        return Fence(tuple(self._last.values()))
