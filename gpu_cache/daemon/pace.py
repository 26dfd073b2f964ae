"""How fast requests are answered at most, so that no client takes the interpreter from the serving thread."""

from __future__ import annotations

from collections.abc import Callable

REQUESTS_PER_SECOND = 100.0
BURST = 50


class Pace:
    """`BURST` requests at once, and `REQUESTS_PER_SECOND` in the long run. One thread.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float], rate: float = REQUESTS_PER_SECOND, burst: int = BURST) -> None:
        self._clock, self._each, self._ahead = clock, 1 / rate, burst / rate
        self._paid = clock()  # the time up to which requests have been answered, at the long run's rate

    @property
    def pause(self) -> float:
        """Seconds until the next request may be answered."""
        return max(0.0, self._paid + self._each - self._ahead - self._clock())

    def take(self) -> None:
        """One is answered."""
        self._paid = max(self._paid, self._clock()) + self._each
