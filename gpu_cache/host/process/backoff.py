"""When to try again: at once after a first loss, then with growing pauses, until something works again."""

from __future__ import annotations

from collections.abc import Callable

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 5.0
GIVE_UP_AFTER = 5
"""Failures in a row. With the pauses between them these are about 1.5 seconds, and the starts of the loaders."""
STEADY_SECONDS = 60.0


class Backoff:
    """Counts failures in a row. A loader that is welcomed and dies before it has answered anything is one more.

    Args:
        clock: seconds.
        first: the pause after the second failure; it doubles with each further one.
    """

    def __init__(self, clock: Callable[[], float], *, first: float = FIRST_SECONDS) -> None:
        self._clock, self._first = clock, first
        self._failures = 0
        self._since: float | None = None

    @property
    def given_up(self) -> bool:
        """Whether who waits should be told; trying goes on."""
        return self._failures >= GIVE_UP_AFTER

    @property
    def pause(self) -> float:
        """Seconds until the next try."""
        return 0.0 if self._failures < 2 else min(LONGEST_SECONDS, self._first * 2.0 ** (self._failures - 2))

    def connected(self) -> None:
        self._since = self._clock()

    def worked(self) -> None:
        """A request was answered."""
        self._failures = 0

    def failed(self) -> None:
        """No connection, or the end of one."""
        if self._since is not None and self._clock() - self._since > STEADY_SECONDS:
            self._failures = 0
        self._since = None
        self._failures += 1
