"""Devices for tests. Each implements `adapterd.gpu_cache.device.Device` and passes its contract suite.

* `HeldDevice`: a CPU device whose copies stop at a gate until the test opens it.
* `SimulatedDevice`: no threads; what is enqueued executes when the test says so, streams in an order drawn
  from a seed. Host bytes are read when a copy executes, and host memory starts poisoned.
* `DefectiveDevice`: one that forgets waits or lies about events, to show that this would be noticed.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from adapterd.gpu_cache.cpu_device import CpuDevice, CpuEvent
from adapterd.gpu_cache.device import Event, Stream

POISON = 0xA5


class HeldDevice(CpuDevice):
    """After `hold`, copies and what stands behind them in their stream wait for `let_go`."""

    def __init__(self) -> None:
        super().__init__()
        self._gate: CpuEvent | None = None
        self.copies_queued = 0

    def hold(self) -> None:
        self._gate = CpuEvent()

    def let_go(self) -> None:
        if self._gate is not None:
            self._gate.set()
            self._gate = None

    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        if self._gate is not None:
            self.wait(stream, self._gate)
        self.copies_queued += 1
        super().copy(stream, dst, src)

    def close(self) -> None:
        self.let_go()
        super().close()


class SimulatedEvent:
    """A mark."""

    def __init__(self) -> None:
        self.fired = False

    def fire(self) -> None:
        self.fired = True

    def done(self) -> bool:
        return self.fired


@dataclass(frozen=True)
class _Wait:
    event: SimulatedEvent


@dataclass(eq=False)
class SimulatedStream:
    """What was enqueued and has not executed."""

    name: str
    queue: deque[Callable[[], object] | _Wait] = field(default_factory=deque)

    @property
    def runnable(self) -> bool:
        if not self.queue:
            return False
        head = self.queue[0]
        return not isinstance(head, _Wait) or head.event.fired

    def run_one(self) -> None:
        work = self.queue.popleft()
        if not isinstance(work, _Wait):
            work()


class SimulatedDevice:
    """See the module. Single-threaded, like the tests that drive it."""

    name = "simulated"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._compute = SimulatedStream("compute")
        self._streams = [self._compute]
        self.copied_bytes = 0  # as enqueued
        self.zeroed_bytes = 0

    @property
    def compute(self) -> Stream:
        return self._compute

    def new_stream(self) -> Stream:
        stream = SimulatedStream(f"stream-{len(self._streams)}")
        self._streams.append(stream)
        return stream

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.zeros(nbytes, dtype=torch.uint8)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        if dst.numel() != src.numel():
            raise ValueError("copy of unequal sizes")
        self.copied_bytes += dst.numel()
        self.launch(stream, lambda: dst.copy_(src))

    def zero(self, stream: Stream, dst: torch.Tensor) -> None:
        self.zeroed_bytes += dst.numel()
        self.launch(stream, dst.zero_)

    def record(self, stream: Stream) -> Event:
        event = SimulatedEvent()
        self.launch(stream, event.fire)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        _simulated(stream).queue.append(_Wait(event))

    def close(self) -> None:
        self.drain()

    # What only the test does

    def launch(self, stream: Stream, work: Callable[[], object]) -> None:
        """Enqueues a kernel."""
        _simulated(stream).queue.append(work)

    def run(self, count: int) -> int:
        """Executes up to `count` pieces of work, each from a runnable stream drawn at random; how many ran."""
        for done in range(count):
            runnable = [s for s in self._streams if s.runnable]
            if not runnable:
                return done
            self._random.choice(runnable).run_one()
        return count

    def drain(self) -> None:
        """Executes everything. What can never run is a deadlock."""
        while self.run(1000):
            pass
        stuck = [s.name for s in self._streams if s.queue]
        assert not stuck, f"streams wait for each other: {stuck}"


def _simulated(stream: Stream) -> SimulatedStream:
    assert isinstance(stream, SimulatedStream)
    return stream


class EarlyEvent(SimulatedEvent):
    """Says that it is done before it is; streams that wait for it still wait."""

    def done(self) -> bool:
        return True


class DefectiveDevice:
    """A simulated device with a defect.

    Args:
        drop_waits_of: `copy` forgets the waits of copy streams, `compute` those of the compute stream.
        early_marks: marks of copy streams are reported as passed at once, so that only the wait of the
            compute stream protects a reader.
    """

    def __init__(
        self,
        inner: SimulatedDevice,
        *,
        drop_waits_of: Literal["copy", "compute"] | None = None,
        early_marks: bool = False,
    ) -> None:
        self.inner, self.name = inner, inner.name
        self._drop, self._early = drop_waits_of, early_marks
        self.allocate_arena, self.allocate_host = inner.allocate_arena, inner.allocate_host
        self.copy, self.zero, self.new_stream = inner.copy, inner.zero, inner.new_stream
        self.launch, self.run, self.drain, self.close = inner.launch, inner.run, inner.drain, inner.close

    @property
    def compute(self) -> Stream:
        return self.inner.compute

    def record(self, stream: Stream) -> Event:
        if not self._early or stream == self.compute:
            return self.inner.record(stream)
        event = EarlyEvent()
        self.inner.launch(stream, event.fire)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        kind = "compute" if stream == self.compute else "copy"
        if kind != self._drop:
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
