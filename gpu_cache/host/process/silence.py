"""Whether a loader that owes answers is still at work.

One that loads for an hour has nothing to say about it, and one that was stopped, or hangs, says nothing either. So
after a while it is asked for a sign of life, which its serving thread gives whatever its loads are at.
"""

from __future__ import annotations

from collections.abc import Callable

ASK_SECONDS = 10.0
PATIENCE_SECONDS = 30.0


class Silence:
    """How long nothing was heard from a loader that owes answers.

    Args:
        clock: seconds.
        ask_after: of silence, and it is asked.
        patience: from then on, and it is given up.
    """

    def __init__(
        self, clock: Callable[[], float], *, ask_after: float = ASK_SECONDS, patience: float = PATIENCE_SECONDS
    ) -> None:
        self._clock, self._ask_after, self._patience = clock, ask_after, patience
        self._since: float | None = None  # None: it owes nothing, or has just spoken
        self._asked = False

    def heard(self) -> None:
        """It has said something, or is another one."""
        self._since, self._asked = None, False

    def left(self, owes: bool) -> float | None:
        """Seconds until `ask` is due; None while it owes nothing."""
        if not owes:
            self.heard()
            return None
        if self._since is None:
            self._since = self._clock()
        limit = self._patience if self._asked else self._ask_after
        return max(0.0, self._since + limit - self._clock())

    def ask(self) -> bool:
        """The time is up, and still there is nothing to hear: whether to ask it. False: it was asked, in vain."""
        if self._asked:
            return False
        self._asked, self._since = True, self._clock()
        return True
