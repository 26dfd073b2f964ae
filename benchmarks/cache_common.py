"""What the parts of `cache_gpu` share: the bench, clocks, figures with their goals, and the decode step."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.machine import ROOT

sys.path.append(str(ROOT / "tests"))  # the fakes: publisher, packages, churn

MIB = 1 << 20
GB = 10**9


@dataclass(frozen=True)
class Figure:
    """One figure and what it is held against.

    Attributes:
        goal: C1 to C8.
        value, unit: `ratio` is over a peer or a limit of the same run.
        most, least: the goal; neither: only told.
    """

    goal: str
    what: str
    value: float
    unit: str = "ratio"
    most: float | None = None
    least: float | None = None

    @property
    def met(self) -> bool | None:
        if self.most is None and self.least is None:
            return None
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


@dataclass
class Part:
    """What one goal's measurement found.

    Attributes:
        data: everything measured, for the file.
        notes: what a reader must know to read the figures rightly.
    """

    figures: list[Figure] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, goal: str, what: str, value: float, unit: str = "ratio", **limits: float) -> None:
        self.figures.append(Figure(goal, what, value, unit, **limits))


@dataclass(frozen=True)
class Bench:
    """Where and how large.

    Attributes:
        device: `cuda:N`, or `cpu` to try the code out.
        small: toy sizes; figures mean nothing then.
        folder: scratch, empty at the start.
        layers: of the model of C8.
    """

    device: str
    small: bool
    folder: Path
    layers: int
    began: float = field(default_factory=time.perf_counter)

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def page_bytes(self) -> int:
        return 4096 if self.small else MIB

    def pick(self, large: int, small: int) -> int:
        return small if self.small else large

    def say(self, words: str) -> None:
        """A line of progress."""
        print(f"{time.perf_counter() - self.began:7.1f} s  {words}", flush=True)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Gives back what torch keeps for later, on the device and pinned."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()  # there in CUDA builds only

    @contextmanager
    def serving_stream(self) -> Iterator[None]:
        """A stream of high priority, as a serving engine has it."""
        with torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1)) if self.cuda else nullcontext():
            yield
            self.synchronize()

    def host(self, nbytes: int) -> torch.Tensor:
        """uint8, random, pinned where there is a GPU."""
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.cuda)
        memory.view(torch.int64).random_()
        return memory


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Microseconds: median, p99 and mean of many."""
    ranked = sorted(seconds)
    return {
        "p50_us": 1e6 * ranked[len(ranked) // 2],
        "p99_us": 1e6 * ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))],
        "mean_us": 1e6 * sum(ranked) / len(ranked),
        "n": len(ranked),
    }


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def repeated(work: Callable[[], object], times: int, done: Callable[[], object]) -> list[float]:
    """Seconds of `work` and of waiting until it is `done`, by the clock, each time from rest."""
    found = []
    for _ in range(times):
        done()
        began = time.perf_counter()
        work()
        done()
        found.append(time.perf_counter() - began)
    return found


class DecodeStep:
    """64 products of 64 rows with 4096² weights in bf16, as a captured graph: about 0.75 ms of an H200."""

    def __init__(self, bench: Bench) -> None:
        width, count = bench.pick(4096, 128), bench.pick(64, 4)
        dtype = torch.bfloat16 if bench.cuda else torch.float32
        self._bench = bench
        self._x = torch.randn(64, width, device=bench.device, dtype=dtype)
        self._weights = [torch.randn(width, width, device=bench.device, dtype=dtype) for _ in range(count)]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._products()
        bench.synchronize()
        if bench.cuda:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._products()
            self._mark = torch.cuda.Event()

    def _products(self) -> None:
        for weight in self._weights:
            self._x @ weight

    def launch(self) -> None:
        """In the current stream."""
        if self._graph is None:
            self._products()
        else:
            self._graph.replay()

    def wait(self) -> None:
        """For what was launched in the current stream, as a loop does that needs the tokens."""
        if self._graph is not None:
            self._mark.record()
            self._mark.synchronize()
