"""What the loader has said and nobody has taken yet.

Taking an answer is Python of some hundred µs in the engine's process. Done by the thread that reads, it keeps the
interpreter from a serving thread that comes back for its next launch. So while steps go on, the reader leaves what
it has cut into frames here, and the serving thread takes it behind its launch, where the device hides it; what
waits longer than `PATIENCE_SECONDS` the reader takes after all. While no steps go on, it takes everything at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock

from adapterd.gpu_cache.host.process.frames import Frame

PATIENCE_SECONDS = 0.002
"""Shorter than this, a step hides what it takes; a longer one has the reader take it in the middle of it."""


class Inbox:
    """Frames in their order, each taken once.

    Args:
        take: told each frame; by one thread at a time. What it raises is the reader's to hear.
        wake: makes the reader look here.
        clock: seconds.
    """

    def __init__(self, take: Callable[[Frame], bool], wake: Callable[[], None], clock: Callable[[], float]) -> None:
        self._take, self._wake, self._clock = take, wake, clock
        self._lock = Lock()
        self._frames: deque[tuple[float, Frame]] = deque()
        self._stepped = -PATIENCE_SECONDS
        self._raised: Exception | None = None

    def put(self, frame: Frame) -> None:
        self._frames.append((self._clock(), frame))

    def deliver(self, most: int | None) -> None:
        """For any thread that holds no lock: never waits, and raises nothing but an interrupt of that thread.

        Args:
            most: answers, in a step: what comes soon afterwards is left to the next one. None: what is left to nobody.
        """
        if most is not None:
            self._stepped = self._clock()
        if not self._frames or not self._lock.acquire(blocking=False):
            return
        try:
            if self._raised is None:  # else it is over with the conversation
                self._take_some(most)
        except Exception as cause:  # noqa: BLE001 - the reader ends the conversation for it
            self._end(cause)
        except BaseException:  # the caller is to stop; what was half taken is lost, so all of it is asked again
            self._end(EOFError("who took its answers was interrupted"))
            raise
        finally:
            self._lock.release()

    def read(self, *, last: bool = False) -> None:
        """For the reader: takes what is left to nobody else. Raises what came out of anybody's taking.

        Args:
            last: nothing will follow: nothing is left to anybody.
        """
        with self._lock:
            raised, self._raised = self._raised, None
            if raised is not None:
                raise raised
            self._take_some(len(self._frames) if last else None)

    def left(self) -> float | None:
        """Seconds until the reader has to look again; None while there is nothing."""
        try:
            since, _ = self._frames[0]
        except IndexError:
            return None
        return max(0.0, self._due(since) - self._clock())

    def clear(self) -> None:
        """Another loader speaks from now on. Returns once nobody takes anything."""
        with self._lock:
            self._frames.clear()
            self._raised = None

    def _end(self, cause: Exception) -> None:
        """With the lock."""
        self._raised = cause
        self._wake()

    def _due(self, since: float) -> float:
        """When the reader takes what came then."""
        return since + PATIENCE_SECONDS if since - self._stepped < PATIENCE_SECONDS else since

    def _take_some(self, most: int | None) -> None:
        """Up to so many answers, and what comes before each; None: what is due."""
        now, answers = self._clock(), 0
        while self._frames and (self._due(self._frames[0][0]) <= now if most is None else answers < most):
            answers += self._take(self._frames.popleft()[1])
