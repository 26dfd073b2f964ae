"""From a request to its answer. Runs on the daemon's thread; the cache does bookkeeping only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from adapterd.gpu_cache.daemon.feed import Cursor, ResidencyFeed
from adapterd.gpu_cache.daemon.messages import (
    Answer,
    AskDrain,
    AskEvict,
    AskMetrics,
    AskPin,
    AskPrefetch,
    AskResidency,
    AskStatus,
    AskUnpin,
    AskWatch,
    DrainAnswer,
    EvictAnswer,
    KeptAnswer,
    MetricsAnswer,
    Request,
    UnpinAnswer,
)
from adapterd.gpu_cache.daemon.metrics import text_of
from adapterd.gpu_cache.daemon.served import Kept, Served
from adapterd.gpu_cache.daemon.summary import status_of
from adapterd.loader.errors import error_from

WHOLE_LOOK_SECONDS = 10.0
"""How old what is known may be where no tier has changed: a list of all rows takes the interpreter for a while."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An answer that is not due yet.

    Attributes:
        until: when it is, at the latest; seconds of the clock.
        come: the answer if there is one by now. Raises AdapterdError.
        late: the answer when the time is up.
    """

    until: float
    come: Callable[[], Answer | None]
    late: Callable[[], Answer]


class Desk:
    """Answers requests.

    Args:
        cache: asked for everything; who uses its socket may name any tenant's REF.
        feed: kept up to date here.
        registry: of the metrics.
        clock: seconds.
        table_bytes: device memory of the engine's tables.
    """

    def __init__(
        self,
        cache: Served,
        feed: ResidencyFeed,
        registry: CollectorRegistry,
        clock: Callable[[], float],
        table_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._cache, self._feed, self._registry, self._clock = cache, feed, registry, clock
        self._table_bytes = table_bytes
        self._version: int | None = None  # of the residency that the feed knows
        self._looked = clock()

    def answer(self, request: Request) -> Answer | Waiting:
        """Raises AdapterdError."""
        match request:
            case AskStatus():
                self._cache.pump()
                return status_of(self._cache, self._table_bytes())
            case AskMetrics():
                return MetricsAnswer(text=text_of(self._registry))
            case AskResidency():
                self.peek()
                return self._feed.since(Cursor(request.feed, request.since))
            case AskWatch():
                self.peek()
                return self._watched(Cursor(request.feed, request.since), request.wait_seconds)
            case AskDrain():
                self._version = None
                self._cache.drain(request.on)
                return DrainAnswer(draining=self._cache.draining, drained=self._cache.drained)
            case AskPrefetch() | AskPin() | AskUnpin() | AskEvict():
                return self._about(request)

    def peek(self) -> None:
        """Takes over where everything is, if a tier has changed, if a request was about it, or once in a while."""
        self._cache.pump()
        version, now = self._cache.residency_version, self._clock()
        if version != self._version or now - self._looked >= WHOLE_LOOK_SECONDS:
            self._feed.take(self._cache.residency())
            self._version, self._looked = version, now

    def due(self, waiting: Waiting) -> Answer | None:
        """The answer if it is due, as of the last `peek`. Raises AdapterdError."""
        return waiting.come() or (waiting.late() if self._clock() >= waiting.until else None)

    def _about(self, request: AskPrefetch | AskPin | AskUnpin | AskEvict) -> Answer | Waiting:
        cache, ref, tenant = self._cache, str(request.ref), request.ref.tenant
        self._version = None
        match request:
            case AskPrefetch():
                return self._kept(cache.prefetch(ref, tenant=tenant, to=request.to), request)
            case AskPin():
                return self._kept(cache.pin(ref, tenant=tenant), request)
            case AskUnpin():
                return UnpinAnswer(ref=request.ref, was_pinned=cache.unpin(ref, tenant=tenant))
            case AskEvict():
                return EvictAnswer(ref=request.ref, freed_bytes=cache.evict(ref, tenant=tenant))

    def _kept(self, kept: Kept, request: AskPrefetch | AskPin) -> Answer | Waiting:
        def come() -> Answer | None:
            if kept.problems:
                raise error_from(kept.problems)
            return KeptAnswer(ref=request.ref, ready=True) if kept.ready else None

        return self._in_time(request.wait_seconds, come, lambda: KeptAnswer(ref=request.ref, ready=False))

    def _watched(self, cursor: Cursor, seconds: float) -> Answer | Waiting:
        def come() -> Answer | None:
            return self._feed.since(cursor) if self._feed.news(cursor) else None

        return self._in_time(seconds, come, lambda: self._feed.since(cursor))

    def _in_time(
        self, seconds: float, come: Callable[[], Answer | None], late: Callable[[], Answer]
    ) -> Answer | Waiting:
        waiting = Waiting(self._clock() + seconds, come, late)
        return self.due(waiting) or waiting
