"""How long work takes on the device: medians of events, launches out of a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

COPIED = 2 << 30
"""Bytes of the copy whose rate the floors are made of."""


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def events(work: Callable[[], object], repeats: int) -> float:
    """µs between events around `work`, the median of `repeats`."""
    pairs = [(_event(), _event()) for _ in range(repeats)]
    for pair in pairs:
        pair[0].record()
        work()
        pair[1].record()
    torch.cuda.synchronize()
    return 1e3 * median([begin.elapsed_time(end) for begin, end in pairs])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def graph_us(work: Callable[[], object], repeats: int = 21) -> float:
    """µs of one replay of all that `work` launches. `work` has run once before, so that nothing is compiled."""
    return events(captured(work).replay, repeats)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of all that `work` launches, replayed twice."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replayed_in_turn(graphs: Sequence[torch.cuda.CUDAGraph], repeats: int) -> list[list[float]]:
    """µs of each replay, a list for each graph: what is at one place of the lists was replayed one after the other."""
    pairs = [[(_event(), _event()) for _ in range(repeats)] for _ in graphs]
    for turn in range(repeats):
        for graph, times in zip(graphs, pairs, strict=True):
            times[turn][0].record()
            graph.replay()
            times[turn][1].record()
    torch.cuda.synchronize()
    return [[1e3 * begin.elapsed_time(end) for begin, end in times] for times in pairs]


def copy_rate(device: torch.device, nbytes: int = COPIED) -> float:
    """Bytes read and written a second by a copy of the device to itself."""
    source = torch.empty(nbytes // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / events(lambda: target.copy_(source), 7) * 1e6
