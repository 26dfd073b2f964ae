"""The worker's books about its loader: what was asked and is not answered, and what is held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from adapterd.gpu_cache.host.interface import Slab
from adapterd.gpu_cache.host.process.messages import Request

MAX_LOSSES = 3
"""Loaders that may die while they have a request; it may be what they die of."""


@dataclass(eq=False, slots=True)
class Pending:
    """Asked, not answered. `losses` counts the loaders that it was lost with."""

    message: Request
    settle: Callable[[Any], None]
    losses: int = 0


class Books:
    """Thread-safe; nobody is called under the lock."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._pending: dict[int, Pending] = {}
        self._held: dict[int, Slab] = {}

    def next(self) -> int:
        with self._lock:
            self._count += 1
            return self._count

    def ask(self, pending: Pending) -> None:
        with self._lock:
            self._pending[pending.message.request] = pending

    def answered(self, number: int, holds: Slab | None) -> Pending | None:
        """None if it was released meanwhile. `holds`: where it holds something until it is released."""
        with self._lock:
            pending = self._pending.pop(number, None)
            if pending is not None and holds is not None:
                self._held[number] = holds
            return pending

    def again(self, number: int, pending: Pending, *, holds: bool) -> None:
        """It was answered, and perhaps not told: it is asked anew, unless it was released meanwhile."""
        with self._lock:
            if not holds or self._held.pop(number, None) is not None:
                self._pending[number] = pending

    def released(self, number: int, slab: Slab) -> bool:
        """Whether the loader with this slab has to be told."""
        with self._lock:
            asked = self._pending.pop(number, None)
            return asked is not None or self._held.pop(number, None) is slab

    def requests(self) -> list[Request]:
        """All that are not answered, in their order."""
        with self._lock:
            return [pending.message for _, pending in sorted(self._pending.items())]

    @property
    def owed(self) -> bool:
        """Whether anything is not answered."""
        return bool(self._pending)

    def lost(self) -> list[Pending]:
        """A loader died: those that were lost too often, which are struck."""
        with self._lock:
            for pending in self._pending.values():
                pending.losses += 1
            over = [number for number, pending in self._pending.items() if pending.losses >= MAX_LOSSES]
            return [self._pending.pop(number) for number in over]

    def strike_all(self) -> list[Pending]:
        """Whoever waits; nobody does any more."""
        with self._lock:
            found, self._pending = list(self._pending.values()), {}
            return found

    def __len__(self) -> int:
        return len(self._pending) + len(self._held)
