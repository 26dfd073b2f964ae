"""Running a step's work: at once, or as a captured CUDA graph that is replayed.

A model of many layers is launched from Python in more time than the device needs for a step of few rows. A graph
launches it all at once. Work that may be captured reads and writes at the same addresses every time, launches the
same kernels for the same key, and asks nothing of the host: no copies from it, no waits, no random numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

MOST_GRAPHS = 96
"""A graph of a large model takes some megabytes of device memory beside the pool that all share."""
MOST_FAILURES = 3
_REMEMBERED = 4096

Work = Callable[[], object]


@dataclass(slots=True)
class GraphCounts:
    """Since the start: graphs captured, steps by replay, steps launched one by one, captures that failed."""

    captured: int = 0
    replayed: int = 0
    launched: int = 0
    failed: int = 0


class Runner(Protocol):
    """How a step's work is run. Not thread-safe.

    Attributes:
        counts: what was done so far.
    """

    counts: GraphCounts

    def run(self, key: Hashable | None, work: Work) -> None:
        """Does `work`, or replays what was captured of work with this key.

        Args:
            key: all that the launches of `work` depend on; None: it cannot be captured.
        """
        ...

    def forget(self) -> None:
        """What was captured holds no longer. Nothing of it may be running."""
        ...


class Launched:
    """Every step is launched. A `Runner`."""

    def __init__(self) -> None:
        self.counts = GraphCounts()

    def run(self, key: Hashable | None, work: Work) -> None:
        """See `Runner`."""
        self.counts.launched += 1
        work()

    def forget(self) -> None:
        """See `Runner`."""


class Capture(Protocol):
    """Makes graphs."""

    def __call__(self, work: Work) -> Callable[[], object]:
        """Captures what `work` launches; what repeats it is returned. May do `work`, which changes nothing twice.

        Raises:
            RuntimeError: it cannot be captured. The device goes on as before.
        """
        ...


class Captured:
    """A graph for each key that comes a second time, the least recently used one dropped first. A `Runner`.

    The first time is launched: it compiles and loads what the work needs, and many keys never come again. A key
    whose capture fails is launched from then on, and after a few failures there are no more captures.

    Args:
        capture: what makes graphs.
        most: graphs at once.
    """

    def __init__(self, capture: Capture, most: int = MOST_GRAPHS) -> None:
        self.counts = GraphCounts()
        self._capture, self._most = capture, most
        self._graphs: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._met: set[Hashable] = set()
        self._refused: set[Hashable] = set()

    def run(self, key: Hashable | None, work: Work) -> None:
        """See `Runner`."""
        graph = None if key is None else self._graph(key, work)
        if graph is None:
            self.counts.launched += 1
            work()
        else:
            self.counts.replayed += 1
            graph()

    def forget(self) -> None:
        """See `Runner`."""
        self._graphs.clear()
        self._met.clear()

    def _graph(self, key: Hashable, work: Work) -> Callable[[], object] | None:
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph
        if key in self._refused or self.counts.failed >= MOST_FAILURES:
            return None
        if key not in self._met:
            if len(self._met) >= _REMEMBERED:
                self._met.clear()
            self._met.add(key)
            return None
        return self._captured(key, work)

    def _captured(self, key: Hashable, work: Work) -> Callable[[], object] | None:
        try:
            graph = self._capture(work)
        except RuntimeError:  # launching the work says what is wrong, if anything is
            self.counts.failed += 1
            self._refused.add(key)
            return None
        self.counts.captured += 1
        self._graphs[key] = graph
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)
        return graph


class CudaCapture:
    """CUDA graphs that share one memory pool: never two run at once, and nobody reads one's memory after another.

    Captures are this thread's alone: what loader threads ask of the device meanwhile is no part of them.

    Args:
        device: of the work. Replays are in the stream that is current then.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            # Kernels of a graph keep the priority of the stream they were captured in: decoding goes first.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._device = device

    def __call__(self, work: Work) -> Callable[[], object]:
        """See `Capture`. Libraries get their memory for the capture's stream in a run before it."""
        with torch.cuda.device(self._device):
            current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            current.synchronize()  # another graph is dropped for this one, perhaps: none is running then
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    work()
                    self._into(graph, work)
            finally:
                current.wait_stream(self._stream)
        return graph.replay

    def _into(self, graph: torch.cuda.CUDAGraph, work: Work) -> None:
        """`torch.cuda.graph` does the same, and gives back all cached memory before, which takes longer."""
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            self._abandon(graph)
            raise
        graph.capture_end()

    @staticmethod
    def _abandon(graph: torch.cuda.CUDAGraph) -> None:
        """Ends the capture. If what went wrong has broken it, ending it is an error, too, and has ended it."""
        try:
            graph.capture_end()
        except RuntimeError:
            return
        graph.reset()


def runner_for(device: torch.device, *, graphs: bool = True) -> Runner:
    """Graphs where there are any and they are wanted."""
    return Captured(CudaCapture(device)) if graphs and device.type == "cuda" else Launched()
