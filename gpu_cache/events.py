"""What a registry tells of its changes, and the thread that listens.

A source may hold the question back until something happens. It says an event once or more often, in the order in
which things happened; each is harmless when it comes again. The follower remembers how far it is by a cursor that
only the source understands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from adapterd.loader.errors import AdapterdError, Code, Problem, reject

_LOG = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0
IDLE_SECONDS = 1.0
"""After an answer without events: a source that does not hold questions back is asked that often."""


@dataclass(frozen=True, slots=True)
class Yanked:
    """A version is had by its digest only; who has it may keep it. A route that serves it lets go of it."""

    tenant: str
    adapter: str
    version_number: int
    digest: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A version is had by nobody, and whoever has it gives it up."""

    tenant: str
    adapter: str
    version_number: int
    digest: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Released:
    """A version that was quarantined or yanked may be had again."""

    tenant: str
    adapter: str
    version_number: int
    digest: str


@dataclass(frozen=True, slots=True)
class KeyRevoked:
    """What this publisher's key signed in this tenant is given up."""

    tenant: str
    key_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AliasMoved:
    """An alias means another version now, or none."""

    tenant: str
    adapter: str
    alias: str


Event = Yanked | Quarantined | Released | KeyRevoked | AliasMoved


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened after the cursor that was asked with, and the cursor to ask with next."""

    events: tuple[Event, ...]
    cursor: str


class EventSource(Protocol):
    """A registry's changes."""

    def changes(self, since: str | None) -> Changes:
        """May block until there are some, and answer with none. None asks from the beginning; so does the source
        answer a cursor that it does not know any more.

        Raises AdapterdError: it cannot be asked.
        """
        ...


class EventFollower:
    """Asks again and again, and hands events on in order. A context manager with a thread of its own.

    After a failure it waits, twice as long each time, and asks with the same cursor. If handing on an event fails,
    its whole answer is asked for again.
    """

    def __init__(
        self,
        source: EventSource,
        heed: Callable[[Event], None],
        *,
        cursor: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """
        Args:
            heed: takes an event, any number of times: `AdapterCache.heed`.
            cursor: where an earlier follower ended.
            clock: seconds, for `heard_at`.
            wait: waits that many seconds, and says whether to end; else an event that `close` sets.
        """
        self._source, self._heed, self._clock = source, heed, clock
        self._closing = threading.Event()
        self._wait = wait or self._closing.wait
        self._failures = 0
        self.cursor = cursor
        self.problem: Problem | None = None
        """Why it does not know what happens; None while it does."""
        self.heard_at = clock()
        """When the source last answered."""
        self._thread = threading.Thread(target=self.run, name="adapterd-events", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self.close()

    def close(self, timeout: float = 0.0) -> None:
        """Ends it. Idempotent. A source that holds its answer back is left alone after `timeout` seconds."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def run(self) -> None:
        """Until it is closed, or `wait` says so."""
        while not self._closing.is_set() and not self._wait(self.poll()):
            pass

    def poll(self) -> float:
        """Asks once: seconds to wait until the next time."""
        try:
            changes = self._source.changes(self.cursor)
            for event in changes.events:
                if self._closing.is_set():
                    return 0.0
                self._heed(event)
        except AdapterdError as failure:
            return self._failed(failure.problem)
        except Exception as bug:  # noqa: BLE001 - a thread that dies would hear nothing more
            _LOG.exception("following the registry's changes failed")
            return self._failed(reject(Code.INTERNAL, "events", type(bug).__name__))
        self.cursor, self.problem, self._failures, self.heard_at = changes.cursor, None, 0, self._clock()
        return 0.0 if changes.events else IDLE_SECONDS

    def _failed(self, problem: Problem) -> float:
        self.problem = problem
        _LOG.warning("the registry's changes are not known: %s", problem)
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return pause
