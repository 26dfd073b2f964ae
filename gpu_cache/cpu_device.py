"""The CPU as a device. Copies are asynchronous here too: each stream is a thread that works off a queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from adapterd.gpu_cache.adopted import AdoptedMemory
from adapterd.gpu_cache.device import Event, Run, Stream, check_runs
from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from typing_extensions import Buffer


class CpuEvent:
    """A mark that a stream sets when it gets there."""

    def __init__(self, stream: CpuStream | InlineStream | None = None) -> None:
        self._set = threading.Event()
        self._stream = stream

    def done(self) -> bool:
        if not self._set.is_set():
            return False
        if self._stream is not None and self._stream.broken:
            raise error(Code.DEVICE_ERROR, "cpu", f"work in a stream failed: {self._stream.broken}")
        return True

    def set(self) -> None:
        self._set.set()

    def synchronize(self) -> None:
        """Blocks until the mark is reached. For stream threads, never for the serving thread."""
        self._set.wait()


class CpuStream:
    """A thread and its queue. Work that fails is reported by every mark behind it, as a GPU does it.

    `broken`: what failed first, or nothing.
    """

    def __init__(self, name: str) -> None:
        self.broken = ""
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as cause:  # noqa: BLE001 - a dead thread would leave every lease waiting
                self.broken = self.broken or f"{type(cause).__name__}: {cause}"

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class InlineStream:
    """The stream of the model on a CPU: the work is done by whoever enqueues it, before the call returns."""

    broken = ""

    def submit(self, work: Callable[[], object]) -> None:
        work()


class CpuDevice:
    """Device over host memory; see `device.Device`."""

    name = "cpu"
    copy_method = "cpu"

    def __init__(self) -> None:
        self._compute = InlineStream()
        self._adopted = AdoptedMemory(self.name)
        self._events = WeakSet[CpuEvent]()
        self.streams: list[CpuStream] = []

    @property
    def events_alive(self) -> int:
        return len(self._events)

    @property
    def compute(self) -> Stream:
        return self._compute

    def new_stream(self) -> Stream:
        stream = CpuStream(f"adapterd-stream-{len(self.streams)}")
        self.streams.append(stream)
        return stream

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        return _zeros(nbytes)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return _zeros(nbytes)

    def adopt_host(self, memory: Buffer) -> torch.Tensor:
        return self._adopted.add(memory).tensor

    def disown_host(self, adopted: torch.Tensor) -> None:
        self._adopted.drop(adopted)

    def copy_runs(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int
    ) -> None:
        check_runs(dst, src, runs, page_bytes)

        def work() -> None:
            for source, target, length in runs:
                origin = src[source * page_bytes : (source + length) * page_bytes]
                dst[target * page_bytes : (target + length) * page_bytes].copy_(origin)

        _queue(stream).submit(work)

    def zero(self, stream: Stream, dst: torch.Tensor) -> None:
        _queue(stream).submit(dst.zero_)

    def record(self, stream: Stream) -> Event:
        queue = _queue(stream)
        event = CpuEvent(queue)
        self._events.add(event)
        queue.submit(event.set)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, CpuEvent), "an event of another device"
        _queue(stream).submit(event.synchronize)

    def close(self) -> None:
        while self.streams:
            self.streams.pop().close()
        self._adopted.drop_all()


def _queue(stream: Stream) -> CpuStream | InlineStream:
    assert isinstance(stream, CpuStream | InlineStream), "a stream of another device"
    return stream


def _zeros(nbytes: int) -> torch.Tensor:
    try:
        with torch.inference_mode(False):  # else only that mode could ever write to it
            return torch.zeros(nbytes, dtype=torch.uint8)
    except RuntimeError as cause:  # torch's word for "not enough memory"
        raise error(
            Code.DEVICE_ERROR,
            "cpu",
            f"cannot allocate {nbytes} bytes of host memory",
            "Lower vram_bytes or host_bytes.",
        ) from cause
