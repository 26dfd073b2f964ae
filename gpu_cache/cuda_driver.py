"""What `CudaDevice` needs of CUDA, and the choice of who does it.

`cuda_runtime.CudaRuntime` calls the runtime library that torch has loaded; `TorchDriver` stands in where
there is none, and costs about 10 µs a call. What is chosen has copied something first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from adapterd.gpu_cache.device import Run
from adapterd.loader.errors import AdapterdError, Code, error


class Driver(Protocol):
    """One CUDA device by raw handles. Failures come out as Unavailable (DEVICE_ERROR).

    Streams are CUDA's own handles; events are numbers that mean something to their driver only.
    """

    @property
    def copy_method(self) -> str: ...

    def current_stream(self) -> int:
        """Torch's current stream in this thread."""
        ...

    def new_stream(self) -> int:
        """One that does not wait for the default stream."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def synchronize(self, stream: int) -> None:
        """Blocks until everything in `stream` has executed."""
        ...

    def new_event(self) -> int:
        """Without timing."""
        ...

    def destroy_event(self, event: int) -> None:
        """Never raises: called when the last reference is dropped, perhaps while the process ends."""
        ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, stream: int, event: int) -> None: ...

    def done(self, event: int) -> bool: ...

    def copy(self, stream: int, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int) -> None:
        """Copies pages from host to device, as `Device.copy_runs`, unchecked. In any order."""
        ...

    def zero(self, stream: int, dst: torch.Tensor) -> None: ...

    def register(self, address: int, nbytes: int, read_only: bool) -> None:
        """Pins host memory for all contexts."""
        ...

    def unregister(self, address: int) -> None: ...


def open_driver(index: int) -> Driver:
    """The fastest way that works here: a batch a call, else a run a call, else torch."""
    from adapterd.gpu_cache.cuda_runtime import CudaRuntime, loaded_runtime

    path = loaded_runtime()
    ways: list[Callable[[], Driver]] = []
    if path is not None:
        ways = [lambda: CudaRuntime(path, index, batched=True), lambda: CudaRuntime(path, index, batched=False)]
    for way in ways:
        try:
            driver = way()
            prove(driver, index)
        except (AdapterdError, OSError, AttributeError):  # no such library, no such function, or it does not work
            continue
        return driver
    return TorchDriver(index)


def prove(driver: Driver, index: int) -> None:
    """Copies neighbours crosswise, with an event behind them. Raises DEVICE_ERROR unless all of it works."""
    size, pieces = 32, 16  # more than any driver copies one by one
    with translated(f"cuda:{index}", "self-test"), torch.inference_mode(False):
        host = torch.arange(size * pieces, dtype=torch.int64).to(torch.uint8).pin_memory()
        host[size * pieces // 2 :] += 7
        there = torch.zeros(size * pieces, dtype=torch.uint8, device=f"cuda:{index}")
        torch.cuda.current_stream(index).synchronize()
    crosswise = [(i, i ^ 1, 1) for i in range(pieces)]
    stream, event = driver.new_stream(), driver.new_event()
    try:
        driver.copy(stream, there, host, crosswise, size)
        driver.zero(stream, there[:16])
        driver.record(event, stream)
        driver.wait(stream, event)
        driver.synchronize(stream)
        passed = driver.done(event)
    finally:
        driver.destroy_event(event)
        driver.destroy_stream(stream)
    wanted = host.view(-1, 2, size).flip(1).flatten()
    wanted[:16] = 0
    with translated(f"cuda:{index}", "self-test"):
        if not passed or not torch.equal(there.cpu(), wanted):
            raise error(Code.DEVICE_ERROR, f"cuda:{index}", f"copies by {driver.copy_method} do not arrive")


@contextmanager
def translated(name: str, doing: str) -> Iterator[None]:
    """RuntimeError is what torch raises for any CUDA failure, AcceleratorError and OutOfMemoryError included."""
    try:
        yield
    except RuntimeError as cause:
        raise error(Code.DEVICE_ERROR, name, f"{doing}: {str(cause).splitlines()[0]}") from cause


class TorchDriver:
    """Driver through torch's own streams and events."""

    copy_method = "torch"

    def __init__(self, index: int) -> None:
        self._index, self._name = index, f"cuda:{index}"
        self._streams: dict[int, torch.cuda.Stream] = {}  # torch's objects own the streams
        self._events: dict[int, torch.cuda.Event] = {}
        self._numbers = itertools.count(1)

    def current_stream(self) -> int:
        return torch.cuda.current_stream(self._index).cuda_stream

    def new_stream(self) -> int:
        with translated(self._name, "new stream"):
            stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        self._streams[stream.cuda_stream] = stream
        return stream.cuda_stream

    def destroy_stream(self, stream: int) -> None:
        self._streams.pop(stream, None)

    def synchronize(self, stream: int) -> None:
        with translated(self._name, "synchronize"):
            self._stream(stream).synchronize()

    def new_event(self) -> int:
        number = next(self._numbers)
        self._events[number] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return number

    def destroy_event(self, event: int) -> None:
        self._events.pop(event, None)

    def record(self, event: int, stream: int) -> None:
        with translated(self._name, "event record"):
            self._events[event].record(self._stream(stream))

    def wait(self, stream: int, event: int) -> None:
        with translated(self._name, "stream wait"):
            self._stream(stream).wait_event(self._events[event])

    def done(self, event: int) -> bool:
        with translated(self._name, "event query"):
            return bool(self._events[event].query())  # type: ignore[no-untyped-call]

    def copy(self, stream: int, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int) -> None:
        with translated(self._name, "copy"), torch.cuda.stream(self._stream(stream)):
            for source, target, count in runs:
                origin = src[source * page_bytes : (source + count) * page_bytes]
                dst[target * page_bytes : (target + count) * page_bytes].copy_(origin, non_blocking=True)

    def zero(self, stream: int, dst: torch.Tensor) -> None:
        with translated(self._name, "zero"), torch.cuda.stream(self._stream(stream)):
            dst.zero_()

    def register(self, address: int, nbytes: int, read_only: bool) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._check(runtime.cudaHostRegister(address, nbytes, register_flags(read_only)), "host memory register")

    def unregister(self, address: int) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._check(runtime.cudaHostUnregister(address), "host memory unregister")

    def _check(self, code: object, doing: str) -> None:
        if int(code) != 0:  # type: ignore[call-overload]
            raise error(Code.DEVICE_ERROR, self._name, f"{doing}: CUDA error {code}")

    def _stream(self, stream: int) -> torch.cuda.Stream:
        if not stream:  # torch takes a zero for no handle, and would make another stream
            return torch.cuda.default_stream(self._index)
        known = self._streams.get(stream)
        return known or torch.cuda.ExternalStream(stream, self._index)  # type: ignore[no-untyped-call]


def register_flags(read_only: bool) -> int:
    """cudaHostRegisterPortable, and cudaHostRegisterReadOnly, without which a read-only mapping is refused."""
    return 0x01 | (0x08 if read_only else 0)
