"""The port to a device: one arena, one host slab, streams that execute in order, events between them.

Everything here is enqueued and returns at once. What stands in one stream executes in the order of the
calls; two streams are ordered only by `record` and `wait`. Three implementations pass one contract suite:
`cpu_device.CpuDevice`, `cuda_device.CudaDevice` and the simulated device of the tests, whose streams
execute out of order under a seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A mark in a stream."""

    def done(self) -> bool:
        """Whether everything enqueued before the mark has executed. Never blocks. Raises Unavailable (DEVICE_ERROR)."""
        ...


class Stream(Protocol):
    """An ordered queue of device work. Streams are compared by `==` and may be keys of a dict."""

    def __hash__(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...


class Device(Protocol):
    """Where adapters live. Failures of the device come out as Unavailable (DEVICE_ERROR)."""

    @property
    def name(self) -> str:
        """`cpu`, `cuda:0`, …"""
        ...

    @property
    def compute(self) -> Stream:
        """The stream in which the model runs: on CUDA the caller's current stream, on the CPU inline execution."""
        ...

    def new_stream(self) -> Stream: ...

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the device, zeroed; once. Like `allocate_host` whatever torch mode the caller is in."""
        ...

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] in host memory that copies may read asynchronously (pinned on CUDA); once."""
        ...

    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueues dst ← src, equal sizes. The host bytes are read when the copy executes, not now."""
        ...

    def zero(self, stream: Stream, dst: torch.Tensor) -> None:
        """Enqueues dst ← 0."""
        ...

    def record(self, stream: Stream) -> Event:
        """Enqueues a mark."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Enqueues a wait: what follows in `stream` executes after `event`. No host wait (I13)."""
        ...

    def close(self) -> None:
        """Lets what is enqueued finish, then ends the device's threads. Idempotent."""
        ...


def open_device(name: str) -> Device:
    """The device of a configuration: `cpu`, `cuda` or `cuda:N`. Raises Failed (SETTINGS_INVALID)."""
    kind, _, index = name.partition(":")
    if kind == "cpu" and not index:
        from adapterd.gpu_cache.cpu_device import CpuDevice

        return CpuDevice()
    if kind == "cuda" and (not index or index.isdecimal()):
        from adapterd.gpu_cache.cuda_device import CudaDevice

        return CudaDevice(int(index or 0))
    raise error(Code.SETTINGS_INVALID, "device", f"{name!r} is no device", "Use cpu, cuda or cuda:N.")
