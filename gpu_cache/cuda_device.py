"""One CUDA device through torch. The only place that turns torch's CUDA errors into ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from adapterd.gpu_cache.device import Event, Stream
from adapterd.loader.errors import Code, error


@contextmanager
def _translated(name: str, doing: str) -> Iterator[None]:
    """RuntimeError is what torch raises for any CUDA failure, AcceleratorError and OutOfMemoryError included."""
    try:
        yield
    except RuntimeError as cause:
        raise error(Code.DEVICE_ERROR, name, f"{doing}: {str(cause).splitlines()[0]}") from cause


class CudaEvent:
    """A CUDA event without timing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.inner = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def done(self) -> bool:
        with _translated(self._name, "event query"):
            return bool(self.inner.query())  # type: ignore[no-untyped-call]


class CudaDevice:
    """Device over `torch.cuda`; see `device.Device`. Streams are `torch.cuda.Stream`s."""

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise error(
                Code.DEVICE_ERROR,
                f"cuda:{index}",
                "no such CUDA device here",
                'Use device="cpu", or install a driver.',
            )
        self._index = index
        self._streams: list[torch.cuda.Stream] = []

    @property
    def name(self) -> str:
        return f"cuda:{self._index}"

    @property
    def compute(self) -> Stream:
        return torch.cuda.current_stream(self._index)

    def new_stream(self) -> Stream:
        with _translated(self.name, "new stream"):
            stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        self._streams.append(stream)
        return stream

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        """The zeroing has executed when this returns: later streams need not know of it."""
        with _translated(self.name, f"arena of {nbytes} bytes"), torch.inference_mode(False):
            arena = torch.zeros(nbytes, dtype=torch.uint8, device=self.name)
            torch.cuda.current_stream(self._index).synchronize()
        return arena

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        with _translated(self.name, f"{nbytes} bytes of pinned host memory"), torch.inference_mode(False):
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        if dst.numel() != src.numel():
            raise ValueError(f"copy of {src.numel()} bytes into {dst.numel()}")
        with _translated(self.name, "copy"), torch.cuda.stream(_stream(stream)):
            dst.copy_(src, non_blocking=True)

    def zero(self, stream: Stream, dst: torch.Tensor) -> None:
        with _translated(self.name, "zero"), torch.cuda.stream(_stream(stream)):
            dst.zero_()

    def record(self, stream: Stream) -> Event:
        event = CudaEvent(self.name)
        with _translated(self.name, "event record"):
            event.inner.record(_stream(stream))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, CudaEvent), "an event of another device"
        with _translated(self.name, "stream wait"):
            _stream(stream).wait_event(event.inner)

    def close(self) -> None:
        while self._streams:
            with _translated(self.name, "synchronize"):
                self._streams.pop().synchronize()


def _stream(stream: Stream) -> torch.cuda.Stream:
    assert isinstance(stream, torch.cuda.Stream), "a stream of another device"
    return stream
