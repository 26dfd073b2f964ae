"""A device without threads: what is enqueued executes when the test says so, streams in an order drawn from a seed.

It is unkind in every way that a real one may be:

* a batch of copies falls into single page copies, in any order, and other streams get in between; when the first
  of them executes, all of the batch's target pages are poisoned, so that nobody profits from what was there;
* host bytes are read when a copy executes; host memory starts poisoned, and a copy that executes from memory
  which was disowned meanwhile is an error;
* inside `serving()`, in that thread, whatever would make a real host wait is an error.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adapterd.gpu_cache.adopted import AdoptedMemory
from adapterd.gpu_cache.device import Event, Run, Stream, check_runs

POISON = 0xA5


class HostSynchronisation(AssertionError):
    """The serving thread did what waits for the device (I13)."""


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
    """See the module. Streams are `compute`, `copy-1`, `copy-2`, … Driven by one thread at a time."""

    name = "simulated"
    copy_method = "simulated"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._compute = SimulatedStream("compute")
        self._streams = [self._compute]
        self._adopted = AdoptedMemory(self.name)
        self._gone = set[int]()  # addresses of what was disowned
        self._on_device = set[int]()  # addresses of arenas
        self._events = WeakSet[SimulatedEvent]()
        self._serving: int | None = None
        self.copied_bytes = 0  # as enqueued
        self.zeroed_bytes = 0

    @property
    def events_alive(self) -> int:
        return len(self._events)

    @property
    def compute(self) -> Stream:
        return self._compute

    def new_stream(self) -> Stream:
        stream = SimulatedStream(f"copy-{len(self._streams)}")
        self._streams.append(stream)
        return stream

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        self._blocks("allocate_arena")
        with torch.inference_mode(False):
            arena = torch.zeros(nbytes, dtype=torch.uint8)
        self._on_device.add(arena.data_ptr())
        return arena

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self._blocks("allocate_host")
        with torch.inference_mode(False):
            return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def adopt_host(self, memory: Any) -> torch.Tensor:
        self._blocks("adopt_host")
        adopted = self._adopted.add(memory)
        self._gone.discard(adopted.address)
        return adopted.tensor

    def disown_host(self, adopted: torch.Tensor) -> None:
        self._blocks("disown_host")
        if self._adopted.drop(adopted) is not None:
            self._gone.add(adopted.data_ptr())

    def copy_runs(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int
    ) -> None:
        check_runs(dst, src, runs, page_bytes)
        pages = [(source + i, target + i) for source, target, length in runs for i in range(length)]
        assert len({target for _, target in pages}) == len(pages), "a page is written twice in one batch"
        self._random.shuffle(pages)
        self.copied_bytes += len(pages) * page_bytes

        def page(memory: torch.Tensor, number: int) -> torch.Tensor:
            return memory[number * page_bytes : (number + 1) * page_bytes]

        def poison() -> None:
            for _, target in pages:
                page(dst, target).fill_(POISON)

        def copy(source: int, target: int) -> None:
            assert src.untyped_storage().data_ptr() not in self._gone, "a copy from memory that was disowned"
            page(dst, target).copy_(page(src, source))

        self.launch(stream, poison)
        for source, target in pages:
            self.launch(stream, lambda source=source, target=target: copy(source, target))  # type: ignore[misc]

    def zero(self, stream: Stream, dst: torch.Tensor) -> None:
        self.zeroed_bytes += dst.numel()
        self.launch(stream, dst.zero_)

    def record(self, stream: Stream) -> Event:
        event = SimulatedEvent()
        self._events.add(event)
        self.launch(stream, event.fire)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        _simulated(stream).queue.append(_Wait(event))

    def close(self) -> None:
        self._blocks("close")
        self.drain()
        self._gone |= {adopted.address for adopted in self._adopted.drop_all()}

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

    @contextmanager
    def serving(self) -> Iterator[None]:
        """What the serving thread does. HostSynchronisation for what blocks, and for a look into the arena."""
        before, self._serving = self._serving, threading.get_ident()
        try:
            with _NoLook(self._on_device):
                yield
        finally:
            self._serving = before

    def _blocks(self, what: str) -> None:
        if self._serving == threading.get_ident():
            raise HostSynchronisation(what)


class _NoLook(TorchDispatchMode):
    """Operations that are done by this thread, now, on memory in which the device works. Views are none."""

    def __init__(self, forbidden: set[int]) -> None:
        super().__init__()
        self._forbidden = forbidden

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        if not func.is_view and any(t.untyped_storage().data_ptr() in self._forbidden for t in tensors):
            raise HostSynchronisation(f"{func} on the arena")
        return func(*args, **(kwargs or {}))


def _simulated(stream: Stream) -> SimulatedStream:
    assert isinstance(stream, SimulatedStream)
    return stream
