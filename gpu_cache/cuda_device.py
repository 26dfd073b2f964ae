"""One CUDA device: torch for its memory, `cuda_driver` for what is enqueued."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from adapterd.gpu_cache.adopted import AdoptedMemory
from adapterd.gpu_cache.cuda_driver import Driver, open_driver, translated
from adapterd.gpu_cache.device import Event, Run, Stream, check_runs
from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from typing_extensions import Buffer


class EventPool:
    """CUDA events, used again: once as many exist as are in use at a time, none is made any more.

    An event may be recorded anew while streams still wait for its former mark: they keep waiting for that.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._spare: deque[int] = deque()  # by several threads
        self._alive: set[int] = set()
        self._closed = False

    @property
    def alive(self) -> int:
        return len(self._alive)

    def take(self) -> int:
        try:
            return self._spare.pop()
        except IndexError:
            event = self.driver.new_event()
            self._alive.add(event)
            return event

    def give_back(self, event: int) -> None:
        self._spare.append(event)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Destroys the spare ones now, and the others when they come back."""
        self._closed = True
        while self._spare:
            event = self._spare.pop()
            self._alive.discard(event)
            self.driver.destroy_event(event)


class CudaEvent:
    """A mark. Its CUDA event goes back to the pool when nobody refers to the mark any more.

    `own`: the stream that it is in, if that was the device's own when it was made. Another one's handle may be given
    out anew, even to the device, once somebody has destroyed that stream.
    """

    __slots__ = ("_passed", "_pool", "handle", "own")

    def __init__(self, pool: EventPool, own: Stream | None = None) -> None:
        self._passed, self._pool, self.own = False, pool, own
        self.handle = pool.take()

    def done(self) -> bool:
        self._passed = self._passed or self._pool.driver.done(self.handle)
        return self._passed

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._pool.give_back(self.handle)


class CudaDevice:
    """Device over CUDA; see `device.Device`. Streams are CUDA's raw handles."""

    def __init__(self, index: int = 0, driver: Driver | None = None) -> None:
        """Tries the ways to copy, and blocks while it does.

        Args:
            index: of the device among those that torch sees.
            driver: else the fastest that works.
        """
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise error(
                Code.DEVICE_ERROR,
                f"cuda:{index}",
                "no such CUDA device here",
                'Use device="cpu", or install a driver.',
            )
        self._index, self.name = index, f"cuda:{index}"
        self._driver = driver or open_driver(index)
        self._events = EventPool(self._driver)
        self._adopted = AdoptedMemory(self.name)
        self._streams: list[int] = []

    @property
    def copy_method(self) -> str:
        return self._driver.copy_method

    @property
    def events_alive(self) -> int:
        return self._events.alive

    @property
    def compute(self) -> Stream:
        return self._driver.current_stream()

    def new_stream(self) -> Stream:
        stream = self._driver.new_stream()
        self._streams.append(stream)
        return stream

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        """The zeroing has executed when this returns: later streams need not know of it."""
        with translated(self.name, f"arena of {nbytes} bytes"), torch.inference_mode(False):
            arena = torch.zeros(nbytes, dtype=torch.uint8, device=self.name)
            torch.cuda.current_stream(self._index).synchronize()
        return arena

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        with translated(self.name, f"{nbytes} bytes of pinned host memory"), torch.inference_mode(False):
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def adopt_host(self, memory: Buffer) -> torch.Tensor:
        adopted = self._adopted.add(memory)
        try:
            self._driver.register(adopted.address, adopted.nbytes, adopted.read_only)
        except BaseException:
            self._adopted.drop(adopted.tensor)
            raise
        return adopted.tensor

    def disown_host(self, adopted: torch.Tensor) -> None:
        known = self._adopted.drop(adopted)
        if known is not None:
            self._driver.unregister(known.address)

    def copy_runs(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int
    ) -> None:
        check_runs(dst, src, runs, page_bytes)
        self._driver.copy(_handle(stream), dst, src, runs, page_bytes)

    def zero(self, stream: Stream, dst: torch.Tensor) -> None:
        self._driver.zero(_handle(stream), dst)

    def record(self, stream: Stream) -> Event:
        event = CudaEvent(self._events, stream if stream in self._streams else None)
        self._driver.record(event.handle, _handle(stream))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """A stream of our own need not wait for a mark of its own: what comes later executes later."""
        assert isinstance(event, CudaEvent), "an event of another device"
        if event.own is None or event.own != stream:
            self._driver.wait(_handle(stream), event.handle)

    def close(self) -> None:
        """Registered memory goes after the copies from it, and a stream after what is in it, whatever fails."""
        streams, self._streams = self._streams, []
        with ExitStack() as last_first:
            last_first.callback(self._events.close)
            for stream in streams:
                last_first.callback(self._driver.destroy_stream, stream)
            for adopted in self._adopted.drop_all():
                last_first.callback(self._driver.unregister, adopted.address)
            for stream in streams:
                last_first.callback(self._driver.synchronize, stream)


def _handle(stream: Stream) -> int:
    assert isinstance(stream, int), "a stream of another device"
    return stream
