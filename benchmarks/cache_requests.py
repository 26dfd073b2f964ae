"""Requests that come by Zipf's law to the reference worker's loop, and what its steps take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from benchmarks.cache_adapters import TENANT
from benchmarks.cache_common import Bench, summary
from benchmarks.cache_model import NoEngine, TimedEngine, TimedModel

from adapterd.cli.worker.loop import ServingLoop
from adapterd.cli.worker.requests import Ended, Event, Reason, Request
from adapterd.cli.worker.scheduling import FirstComeFirstServed
from adapterd.gpu_cache import AdapterCache

ROWS = 64
AHEAD = 32
_names = count()


def zipf(count: int, seed: int, exponent: float = 1.0) -> Iterator[int]:
    """Numbers below `count`, number k with a chance in proportion to (k + 1)^-exponent; for ever."""
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    edges = np.cumsum(weights / weights.sum())
    rng = np.random.default_rng(seed)
    while True:
        yield from np.minimum(np.searchsorted(edges, rng.random(4096)), count - 1).tolist()


def refs_of(numbers: Iterator[int], refs: Sequence[str]) -> Iterator[str | None]:
    """The REFs that those numbers stand for."""
    return (refs[number] for number in numbers)


@dataclass
class Served:
    """What a run of the loop did.

    Attributes:
        walls: seconds of each step, from its begin to its tokens and what callers do with them.
        prompts: of each of these, whether the forward that it waited for, the one before, ran prompts beside tokens.
        token_gaps: seconds from a request's token to its next one, all but the first: what a warm row waits.
        gpu, between: see `cache_model.Counted`, by events; none on the CPU.
        tokens: that were generated.
        rows: of all steps together, prompts included, without padding.
        begin_seconds: the engine's plans. model_seconds: launching or replaying, on the CPU.
        adapters: (how many, bytes) of some steps.
    """

    walls: list[float] = field(default_factory=list)
    prompts: list[bool] = field(default_factory=list)
    token_gaps: list[float] = field(default_factory=list)
    gpu: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    seconds: float = 0.0
    begin_seconds: float = 0.0
    model_seconds: float = 0.0
    adapters: Sequence[tuple[int, int]] = ()

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def p99_us(self) -> float:
        return summary(self.walls)["p99_us"]

    @property
    def p50_us(self) -> float:
        return summary(self.walls)["p50_us"]

    @property
    def token_p99_us(self) -> float:
        return summary(self.token_gaps)["p99_us"]


class Callers:
    """Keep a loop busy: as soon as a request ends, another comes. Prompts are random, answers have no early end.

    Args:
        wanted: REFs of requests to come; None is the base.
        prompt, tokens: of a request; tokens vary by a half, so that requests do not end all at once.
    """

    def __init__(
        self,
        bench: Bench,
        model: TimedModel,
        engine: TimedEngine | NoEngine,
        cache: AdapterCache,
        wanted: Iterator[str | None],
    ) -> None:
        self._model, self._engine, self._wanted = model, engine, wanted
        self._prompt, self._tokens = bench.pick(64, 6), bench.pick(128, 6)
        scheduler = FirstComeFirstServed(seats=ROWS, ahead=AHEAD)
        anything: Any = engine  # what stands for no engine has its four words
        self.loop = ServingLoop(model, anything, cache, scheduler=scheduler, max_rows=2 * ROWS)
        self._random = np.random.default_rng(5)
        self._open = self._told = self._asked = 0
        self._spoke: dict[str, float] = {}  # when each request had its last token in this run
        self._gaps: list[float] = []
        self._over = False

    @property
    def captured(self) -> int:
        """Graphs so far, for all loops of the model."""
        return self._model.runner.counts.captured

    def serve(self, *, seconds: float, steps: int) -> Served:
        """At most `steps` steps, and no new one after `seconds`."""
        served, began = Served(), time.perf_counter()
        self._spoke, self._gaps = {}, served.token_gaps
        self._model.begin_count()
        told, begins, rows = self._told, self._engine.begin_seconds, self.loop.statistics().rows
        seen = len(self._engine.adapters)
        while len(served.walls) < steps and time.perf_counter() - began < seconds:
            if not self._open:
                self._ask()
            then = time.perf_counter()
            ran, prompts = self._model.steps, self._model.prompts
            self.loop.step()
            if self._model.steps > ran:
                served.walls.append(time.perf_counter() - then)
                served.prompts.append(prompts)
        served.seconds = time.perf_counter() - began
        served.tokens = self._told - told
        served.rows = self.loop.statistics().rows - rows
        served.begin_seconds = self._engine.begin_seconds - begins
        served.adapters = self._engine.adapters[seen:]
        counted = self._model.end_count()
        served.gpu, served.between, served.model_seconds = counted.gpu, counted.between, counted.launching
        return served

    def close(self) -> None:
        """Ends what is open, and the loop."""
        self._over = True
        self.loop.close()

    def _ask(self) -> None:
        while self._open < ROWS + AHEAD:
            self._asked += 1
            most = max(1, self._tokens // 2 + (self._asked * 7) % (self._tokens + 1))
            prompt = self._random.integers(0, self._model.vocabulary, self._prompt).tolist()
            self._open += 1
            self.loop.submit(Request(f"r{next(_names)}", TENANT, next(self._wanted), prompt, most), self._on)

    def _on(self, event: Event) -> None:
        if not isinstance(event, Ended):
            self._told += 1
            now = time.perf_counter()
            if event.id in self._spoke:
                self._gaps.append(now - self._spoke[event.id])
            self._spoke[event.id] = now
            return
        self._open -= 1
        self._spoke.pop(event.id, None)
        if event.reason is Reason.FAILED:
            raise SystemExit(f"{event.id}: {event.problems}")
        if not self._over:
            self._ask()
