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
    BegunAnswer,
    DrainAnswer,
    EvictAnswer,
    MetricsAnswer,
    Request,
    UnpinAnswer,
)
from adapterd.gpu_cache.daemon.metrics import text_of
from adapterd.gpu_cache.daemon.served import Served
from adapterd.gpu_cache.daemon.summary import status_of


@dataclass(frozen=True, slots=True)
class Waiting:
    """A `watch` whose answer is due at `until` (seconds of the clock), or when there are news."""

    cursor: Cursor
    until: float


class Desk:
    """Answers requests.

    Args:
        cache: asked for everything; who uses its socket may name any tenant's REF.
        feed: kept up to date here.
        registry: of the metrics.
        clock: seconds.
    """

    def __init__(
        self, cache: Served, feed: ResidencyFeed, registry: CollectorRegistry, clock: Callable[[], float]
    ) -> None:
        self._cache, self._feed, self._registry, self._clock = cache, feed, registry, clock

    def answer(self, request: Request) -> Answer | Waiting:
        """Raises AdapterdError."""
        match request:
            case AskStatus():
                self._cache.pump()
                return status_of(self._cache)
            case AskMetrics():
                return MetricsAnswer(text=text_of(self._registry))
            case AskResidency():
                self.look()
                return self._feed.since(Cursor(request.feed, request.since))
            case AskWatch():
                self.look()
                waiting = Waiting(Cursor(request.feed, request.since), self._clock() + request.wait_seconds)
                return self.news(waiting) or waiting
            case AskDrain():
                self._cache.drain(request.on)
                return DrainAnswer(draining=self._cache.draining)
            case AskPrefetch() | AskPin() | AskUnpin() | AskEvict():
                return self._about(request)

    def look(self) -> None:
        """Takes over where everything is."""
        self._cache.pump()
        self._feed.take(self._cache.residency())

    def news(self, waiting: Waiting) -> Answer | None:
        """The answer to a `watch` if it is due, as of the last look."""
        if self._feed.news(waiting.cursor) or self._clock() >= waiting.until:
            return self._feed.since(waiting.cursor)
        return None

    def _about(self, request: AskPrefetch | AskPin | AskUnpin | AskEvict) -> Answer:
        ref, tenant = str(request.ref), request.ref.tenant
        match request:
            case AskPrefetch():
                self._cache.prefetch(ref, tenant=tenant, to=request.to)
                return BegunAnswer(ref=request.ref)
            case AskPin():
                self._cache.pin(ref, tenant=tenant)
                return BegunAnswer(ref=request.ref)
            case AskUnpin():
                return UnpinAnswer(ref=request.ref, was_pinned=self._cache.unpin(ref, tenant=tenant))
            case AskEvict():
                return EvictAnswer(ref=request.ref, freed_bytes=self._cache.evict(ref, tenant=tenant))
