"""Windows of a serving loop, each held against the others' of its round; what compiles in one makes it void.

A kernel that is compiled or a graph that is captured takes as long as hundreds of steps. So a run is warmed up until
neither comes any more, both are counted, and a window in which one came after all is left out and told. Python's
collector of cycles is kept out of the windows as the worker keeps it out (`cli.worker.collector`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.cache_common import Bench, summary
from benchmarks.cache_requests import Callers, Served

from adapterd.cli.worker.collector import seldom_collected

ROUNDS, MOST_ROUNDS = 6, 12
LEAST_CLEAN = 5
WINDOW_SECONDS = 0.8


class Compiles:
    """Kernels that Triton has compiled or loaded since the start; 0 without Triton."""

    count = 0


@contextmanager
def counted_compiles() -> Iterator[Compiles]:
    found = Compiles()
    try:
        from triton import knobs
    except ImportError:
        yield found
        return

    def hook(**_: object) -> None:
        found.count += 1

    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, hook
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before


@dataclass
class Runs:
    """What one kind of callers got.

    Attributes:
        callers: they.
        cold: its first steps, with all that compiled in them.
        windows: by round; None is one that is void.
        void: compiled kernels and captured graphs of each of those.
    """

    callers: Callers
    cold: dict[str, Any] = field(default_factory=dict)
    windows: list[Served | None] = field(default_factory=list)
    void: list[tuple[int, int]] = field(default_factory=list)

    @property
    def clean(self) -> list[Served]:
        return [window for window in self.windows if window is not None]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return median([window.tokens_per_second for window in self.clean])

    @property
    def steps_per_second(self) -> float:
        return median([len(window.walls) / window.seconds for window in self.clean])

    @property
    def token_gaps(self) -> list[float]:
        """Seconds between tokens of a request."""
        return [gap for window in self.clean for gap in window.token_gaps]

    @property
    def adapters(self) -> tuple[float, float]:
        """How many a step has, and their bytes; means of those that were looked at."""
        looked = [each for window in self.clean for each in window.adapters]
        count, nbytes = (sum(each) / max(1, len(looked)) for each in zip(*looked, strict=True)) if looked else (0, 0)
        return count, nbytes

    def _apart(self) -> dict[str, list[float]]:
        """Seconds between tokens, and of steps that waited for a forward with or without rows of prompts."""
        pairs = [pair for window in self.clean for pair in zip(window.walls, window.prompts, strict=True)]
        return {
            "between_tokens": self.token_gaps,
            "steps_of_tokens_alone": [wall for wall, prompts in pairs if not prompts],
            "steps_with_prompts": [wall for wall, prompts in pairs if prompts],
        }

    def told(self) -> dict[str, Any]:
        """For the file."""
        speeds = sorted(window.tokens_per_second for window in self.clean)
        gpu = [seconds for window in self.clean for seconds in window.gpu]
        between = [seconds for window in self.clean for seconds in window.between]
        steps = sum(len(window.walls) for window in self.clean)
        parts = {
            name: 1e6 * sum(getattr(window, name) for window in self.clean) / steps
            for name in ("begin_seconds", "model_seconds")
        }
        return {
            **summary([wall for window in self.clean for wall in window.walls]),
            **{name: summary(seconds) for name, seconds in self._apart().items() if seconds},
            "tokens_per_second": self.speed,
            "tokens_per_second_from_to": [speeds[0], speeds[-1]],
            "windows": len(speeds),
            "void": self.void,
            "rows_a_step": sum(window.rows for window in self.clean) / steps,
            "gpu_us_a_step": 1e6 * sum(gpu) / steps if gpu else None,
            "between_us_a_step": 1e6 * sum(between) / steps if between else None,
            "adapters_and_bytes_a_step": self.adapters,
            "engine_begin_us_a_step": parts["begin_seconds"],
            "model_launch_us_a_step": parts["model_seconds"],
            "cold": self.cold,
        }


class Steady:
    """Several kinds of callers, in turn.

    Args:
        kinds: by name.
        seconds: of a window.
    """

    def __init__(
        self, bench: Bench, kinds: Mapping[str, Callers], compiles: Compiles, seconds: float = WINDOW_SECONDS
    ) -> None:
        self._bench, self._compiles, self._seconds = bench, compiles, 1.0 if bench.small else seconds
        self.runs = {name: Runs(callers) for name, callers in kinds.items()}

    def measure(self) -> None:
        """Raises SystemExit if a kind has no window that counts."""
        for name, run in self.runs.items():
            self._warm_up(name, run)
        with seldom_collected():
            self._rounds()
        for name, run in self.runs.items():
            if not run.clean:
                raise SystemExit(f"{name}: something was compiled or captured in every window: {run.void}")
            self._bench.say(f"{name}: {run.told()}")

    def _rounds(self) -> None:
        rounds = self._bench.pick(MOST_ROUNDS, 3)
        for number in range(rounds):
            for run in self.runs.values():
                self._window(run)
            fewest = min(len(run.clean) for run in self.runs.values())
            if number + 1 >= self._bench.pick(ROUNDS, 2) and fewest >= min(LEAST_CLEAN, rounds - 1):
                break

    def ratio(self, name: str, over: str, what: str = "tokens_per_second") -> float:
        """Median of the rounds in which both windows count."""
        return median(self._ratios(name, over, what))

    def spread(self, name: str, over: str) -> str:
        """Of those rounds' tokens a second."""
        ratios = sorted(self._ratios(name, over, "tokens_per_second"))
        return f"{name} over {over}: {ratios[0]:.3f} to {ratios[-1]:.3f} in {len(ratios)} pairs"

    def voids(self) -> str:
        """How many windows do not count, of each kind."""
        return ", ".join(f"{name} {len(run.void)} of {len(run.windows)}" for name, run in self.runs.items())

    def told(self) -> dict[str, Any]:
        """For the file."""
        return {name: run.told() for name, run in self.runs.items()}

    def _ratios(self, name: str, over: str, what: str) -> Sequence[float]:
        pairs = zip(self.runs[name].windows, self.runs[over].windows, strict=True)
        found = [getattr(a, what) / getattr(b, what) for a, b in pairs if a is not None and b is not None]
        if not found:
            raise SystemExit(f"{name} and {over} have no round in which both windows count")
        return found

    def _warm_up(self, name: str, run: Runs) -> None:
        """Until nothing new has come for a while."""
        limit, began = self._bench.pick(15, 2), time.perf_counter()
        first = self._bench.pick(100, 5)
        before = self._marks(run)
        served = run.callers.serve(seconds=limit, steps=first)
        after = self._marks(run)
        run.cold = {
            "steps": len(served.walls), "seconds": served.seconds, "tokens_per_second": served.tokens_per_second,
            "compiled": after[0] - before[0], "captured": after[1] - before[1],
        }  # fmt: skip
        while time.perf_counter() - began < limit:
            before = self._marks(run)
            run.callers.serve(seconds=2, steps=self._bench.pick(400, 10))
            if self._marks(run) == before:
                break
        self._bench.say(f"{name}: warm after {time.perf_counter() - began:.1f} s; cold {run.cold}")

    def _window(self, run: Runs) -> None:
        run.callers.serve(seconds=1, steps=self._bench.pick(40, 2))  # what the others' windows have displaced
        before = self._marks(run)
        served = run.callers.serve(seconds=self._seconds, steps=1 << 30)
        compiled, captured = (b - a for a, b in zip(before, self._marks(run), strict=True))
        if compiled or captured:
            run.void.append((compiled, captured))
        run.windows.append(None if compiled or captured else served)

    def _marks(self, run: Runs) -> tuple[int, int]:
        return self._compiles.count, run.callers.captured
