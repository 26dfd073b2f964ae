"""Devices for tests. Each implements `adapterd.gpu_cache.device.Device` and passes its contract suite.

* `HeldDevice`: a CPU device whose copies stop at a gate until the test opens it.
* `SimulatedDevice` (in `simulated`): no threads; what is enqueued executes when the test says so.
* `DefectiveDevice`: one that forgets waits or lies about events, to show that this would be noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import torch

from adapterd.gpu_cache.cpu_device import CpuDevice, CpuEvent
from adapterd.gpu_cache.device import Event, Run, Stream

from .simulated import POISON, HostSynchronisation, SimulatedDevice, SimulatedEvent, SimulatedStream

__all__ = [
    "COPY_STREAMS",
    "POISON",
    "Barrier",
    "DefectiveDevice",
    "EarlyEvent",
    "HeldDevice",
    "HostSynchronisation",
    "SimulatedDevice",
    "SimulatedEvent",
    "SimulatedStream",
]

COPY_STREAMS = ("copy-1", "copy-2")
"""As the simulated device names what a cache makes."""


class HeldDevice(CpuDevice):
    """After `hold`, copies and what stands behind them in their stream wait for `let_go`.

    Each stream stops by itself: `let_go` of one stream lets only its copies through.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gates: dict[Stream, CpuEvent] | None = None
        self.copies_queued = 0  # batches

    def hold(self) -> None:
        self._gates = {}

    def let_go(self, stream: Stream | None = None) -> None:
        """Opens the gate of `stream`, or all of them and for good."""
        gates = self._gates or {}
        for gate in list(gates.values()) if stream is None else [gates.pop(stream)]:
            gate.set()
        if stream is None:
            self._gates = None

    def copy_runs(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int
    ) -> None:
        if self._gates is not None:
            self.wait(stream, self._gates.setdefault(stream, CpuEvent()))
        self.copies_queued += 1
        super().copy_runs(stream, dst, src, runs, page_bytes)

    def close(self) -> None:
        self.let_go()
        super().close()


class EarlyEvent(SimulatedEvent):
    """Says that it is done before it is; streams that wait for it still wait."""

    def done(self) -> bool:
        return True


class DefectiveDevice:
    """A simulated device with a defect.

    Args:
        drop_waits_of: names of streams whose waits are forgotten: `compute`, `copy-1`, `copy-2`.
        early_marks_of: names of streams whose marks are reported as passed at once, so that only waits
            protect what stands behind them.
    """

    def __init__(
        self,
        inner: SimulatedDevice,
        *,
        drop_waits_of: Collection[str] = (),
        early_marks_of: Collection[str] = (),
    ) -> None:
        self.inner, self.name, self.copy_method = inner, inner.name, inner.copy_method
        self._drop, self._early = drop_waits_of, early_marks_of
        self.allocate_arena, self.allocate_host = inner.allocate_arena, inner.allocate_host
        self.adopt_host, self.disown_host = inner.adopt_host, inner.disown_host
        self.copy_runs, self.zero, self.new_stream = inner.copy_runs, inner.zero, inner.new_stream
        self.launch, self.run, self.drain, self.close = inner.launch, inner.run, inner.drain, inner.close
        self.serving = inner.serving

    @property
    def events_alive(self) -> int:
        return self.inner.events_alive

    @property
    def compute(self) -> Stream:
        return self.inner.compute

    def record(self, stream: Stream) -> Event:
        assert isinstance(stream, SimulatedStream)
        if stream.name not in self._early:
            return self.inner.record(stream)
        event = EarlyEvent()
        self.inner.launch(stream, event.fire)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(stream, SimulatedStream)
        if stream.name not in self._drop:
            self.inner.wait(stream, event)


class Barrier:
    """A point that a loader thread reaches and stays at until the test lets it go on."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def stop(self) -> None:
        """For the thread: says that it is here, and waits."""
        self._reached.set()
        assert self._open.wait(30), "nobody opened the barrier"

    def await_arrival(self) -> None:
        """For the test."""
        assert self._reached.wait(30), "nobody came to the barrier"

    def open(self) -> None:
        self._open.set()
