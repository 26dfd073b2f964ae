"""Capture where there are no graphs: the work itself, done again with whatever its tensors hold by then.

A graph knows addresses and nothing else. So does this one: work that took anything else from its own step gives that
step's results again, and the tests see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from adapterd.cli.worker.graphs import Work
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.device_plan import LaunchShape, Regime
from adapterd.gpu_cache.engine.step_context import Step

ANY = LaunchShape(Regime.ROWS, 1, 1, 1, 1, 1)


class Repeated:
    """A `graphs.Capture`. `broken`: it raises."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self, work: Work) -> Callable[[], object]:
        """Does the work once, as a run before the capture."""
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        work()
        return work


class OneShape(LoRAEngine[Any]):
    """All its steps have one launch shape, because what is repeated launches anew whatever its step needs."""

    def step(self, rows: Iterable[tuple[Any, int]], *, shape: LaunchShape | None = None) -> Step[Any]:
        return _OneShape(self, tuple(rows), shape)


class _OneShape(Step[Any]):
    @property
    def shape(self) -> LaunchShape | None:
        return ANY
