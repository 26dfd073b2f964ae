"""Turns at a few places that many want: nobody waits for how much another one asks.

Who waits stands in a line of its owner's, and the lines are served in rotation. So a wait is as long as the owner's
own line, times the owners that wait at the same time; an owner that floods lengthens nobody's line but its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from adapterd.loader.errors import Code, error


@dataclass(frozen=True, slots=True)
class Places:
    """How many may be at work and wait.

    Attributes:
        at_once: at work, over all owners.
        each: at work, of one owner. Fewer than `at_once` leaves a place that another owner finds free.
        waiting: in line, of one owner.
    """

    at_once: int
    each: int
    waiting: int


@dataclass(eq=False, slots=True)
class _Waiter:
    """Someone in line. Whoever gives the turn may be in another thread, and in another loop."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    given: bool = False


class Turns:
    """The places, and the lines before them. For many threads; who waits blocks none."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._guard = threading.Lock()
        self._at_work: Counter[str] = Counter()
        self._lines: dict[str, deque[_Waiter]] = {}  # none is empty; their order is the rotation

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """A place for as long as the block takes. Raises as `enter`."""
        await self.enter(owner)
        try:
            yield
        finally:
            self.leave(owner)

    async def enter(self, owner: str) -> None:
        """Wait for a place; `leave` gives it back.

        Raises:
            Unavailable: QUEUE_FULL, as many of the owner's wait already.
        """
        waiter = self._place_or_line(owner)
        if waiter is None:
            return
        try:
            await waiter.turn.wait()
        except BaseException:
            if not self._out_of_line(owner, waiter) and waiter.given:
                self.leave(owner)  # the place that it had been given
            raise

    def leave(self, owner: str) -> None:
        """Give a place back; the next in turn have it."""
        with self._guard:
            self._at_work[owner] -= 1
            if not self._at_work[owner]:
                del self._at_work[owner]
            self._serve()

    def waiting(self, owner: str) -> int:
        """How long the owner's line is."""
        with self._guard:
            return len(self._lines.get(owner, ()))

    def _place_or_line(self, owner: str) -> _Waiter | None:
        """None for a place at once. Whoever is in line now could not have it: its owner has all that it may."""
        with self._guard:
            if self._free(owner):
                self._at_work[owner] += 1
                return None
            line = self._lines.get(owner, deque())
            if len(line) >= self._places.waiting:
                raise _too_many(self._places)
            waiter = _Waiter()
            line.append(waiter)
            self._lines[owner] = line
            return waiter

    def _out_of_line(self, owner: str, waiter: _Waiter) -> bool:
        """Whether it was in line still."""
        with self._guard:
            line = self._lines.get(owner, deque())
            if waiter not in line:
                return False
            line.remove(waiter)
            if not line:
                del self._lines[owner]
            return True

    def _free(self, owner: str) -> bool:
        return self._at_work.total() < self._places.at_once and self._at_work[owner] < self._places.each

    def _serve(self) -> None:
        """Give every free place to the first in the first line whose owner may have it; that line goes to the end."""
        while (owner := next(filter(self._free, self._lines), None)) is not None:
            line = self._lines.pop(owner)
            waiter = line.popleft()
            if line:
                self._lines[owner] = line
            try:
                waiter.loop.call_soon_threadsafe(waiter.turn.set)
            except RuntimeError:  # its loop is closed
                continue
            waiter.given = True
            self._at_work[owner] += 1


def _too_many(places: Places) -> Exception:
    return error(
        Code.QUEUE_FULL, "requests", f"{places.each} requests are at work and {places.waiting} wait already",
        "Try again in a few seconds, or send fewer at once.",
    )  # fmt: skip
