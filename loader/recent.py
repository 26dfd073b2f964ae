"""What was worked out of bytes that do not change, kept in memory for the next time: the latest of it, bounded."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key, each of a weight; what was asked for longest ago goes first. For any thread.

    A key names all that its value was made of, so that a value never becomes wrong. Nothing belongs in here that
    may hold today and not tomorrow: whom to trust, what is revoked, what time it is.
    """

    def __init__(self, most: int) -> None:
        """Args: most: of all weights together."""
        self._most, self._weight = most, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def keep(self, key: K, value: V, weight: int) -> None:
        """Nothing heavier than all together may be: then it is not kept."""
        with self._lock:
            if weight > self._most or key in self._values:
                return
            self._values[key] = value, weight
            self._weight += weight
            while self._weight > self._most:
                self._weight -= self._values.popitem(last=False)[1][1]

    @property
    def weight(self) -> int:
        """Of all that is kept."""
        return self._weight
