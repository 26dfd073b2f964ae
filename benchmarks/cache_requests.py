"""Requests that come by Zipf's law, and a small continuous-batching loop over the cache's own surface."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from benchmarks.cache_adapters import TENANT

from adapterd.gpu_cache import AdapterCache, Lease

Rows = list[tuple[Lease | None, int]]


def zipf(count: int, seed: int, exponent: float = 1.0) -> Iterator[int]:
    """Numbers below `count`, number k with a chance in proportion to (k + 1)^-exponent; for ever."""
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    edges = np.cumsum(weights / weights.sum())
    rng = np.random.default_rng(seed)
    while True:
        yield from np.minimum(np.searchsorted(edges, rng.random(4096)), count - 1).tolist()


@dataclass(eq=False)
class Request:
    """One request; `left` tokens to go. `lease` None: the base."""

    ref: str | None
    lease: Lease | None
    left: int

    @property
    def ready(self) -> bool:
        return self.lease is None or self.lease.ready


@dataclass
class Served:
    """What a run of the loop did.

    Attributes:
        walls: seconds of each step, from its begin to its tokens.
        tokens: of rows with a request.
        rows: such rows a step.
    """

    walls: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    rows: list[int] = field(default_factory=list)
    distinct: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class RequestLoop:
    """Keeps `slots` rows busy. Whatever lease is ready takes a free row; rows without a request are base rows.

    Args:
        wanted: REFs of requests to come; None is the base.
        run: runs the model for these rows and returns when the tokens are there.
        tokens: of a request.
        ahead: requests whose leases are acquired before there is a row for them.
    """

    def __init__(
        self,
        cache: AdapterCache,
        wanted: Iterator[str | None],
        run: Callable[[Rows], object],
        *,
        slots: int = 64,
        tokens: int = 16,
        ahead: int = 32,
    ) -> None:
        self._cache, self._wanted, self._run = cache, wanted, run
        self._slots, self._tokens, self._ahead = slots, tokens, ahead
        self._coming: deque[Request] = deque()
        self._rows: list[Request] = []
        self._admitted = 0

    def serve(self, *, seconds: float, steps: int) -> Served:
        """At most `steps` steps, and no new one after `seconds`."""
        served, began = Served(), time.perf_counter()
        while len(served.walls) < steps and time.perf_counter() - began < seconds:
            self._admit()
            if not self._rows:
                self._cache.pump()
                time.sleep(0)
                continue
            then = time.perf_counter()
            self._run(self._batch())
            served.walls.append(time.perf_counter() - then)
            served.tokens += len(self._rows)
            served.rows.append(len(self._rows))
            served.distinct.append(len({request.ref for request in self._rows}))
            self._retire()
        served.seconds = time.perf_counter() - began
        return served

    def stop(self) -> None:
        """Lets go of everything."""
        for request in (*self._coming, *self._rows):
            _release(request)
        self._coming.clear()
        self._rows.clear()

    def _admit(self) -> None:
        while len(self._coming) < self._ahead + self._slots - len(self._rows):
            ref = next(self._wanted)
            lease = None if ref is None else self._cache.acquire(ref, tenant=TENANT)
            self._coming.append(Request(ref, lease, self._length()))
        for request in [r for r in self._coming if r.ready][: self._slots - len(self._rows)]:
            self._coming.remove(request)
            self._rows.append(request)
        failed = next((r.lease for r in self._coming if r.lease is not None and r.lease.failed), None)
        if failed is not None:
            raise SystemExit(f"{failed!r}: {failed.problem}")

    def _length(self) -> int:
        """Half to one and a half of `tokens`, so that requests do not end all at once."""
        self._admitted += 1
        return max(1, self._tokens // 2 + (self._admitted * 7) % (self._tokens + 1))

    def _batch(self) -> Rows:
        """Rows of one adapter side by side, so that they are one segment; base rows last."""
        mine = sorted(self._rows, key=lambda request: request.ref or "")
        rows: Rows = [(request.lease, 1) for request in mine]
        return [*rows, (None, self._slots - len(rows))] if len(rows) < self._slots else rows

    def _retire(self) -> None:
        kept = []
        for request in self._rows:
            request.left -= 1
            if request.left:
                kept.append(request)
            else:
                _release(request)
        self._rows = kept


def _release(request: Request) -> None:
    if request.lease is not None:
        request.lease.release()


def refs_of(numbers: Iterator[int], refs: Sequence[str]) -> Iterator[str | None]:
    """The REFs that those numbers stand for."""
    return (refs[number] for number in numbers)
