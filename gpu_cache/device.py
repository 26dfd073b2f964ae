"""The port to a device: one arena, host memory, streams that execute in order, events between them.

Everything here is enqueued and returns at once, but for what takes or gives back memory, and `close`. What
stands in one stream executes in the order of the calls; two streams are ordered only by `record` and `wait`.
Three implementations pass one contract suite: `cpu_device.CpuDevice`, `cuda_device.CudaDevice` and the
simulated device of the tests, whose streams execute out of order under a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import TYPE_CHECKING, Protocol

from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

Run = tuple[int, int, int]
"""(first source page, first target page, how many): neighbours on both sides."""


class Event(Protocol):
    """A mark in a stream. Its resources go back to the device when the last reference is dropped."""

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
    def copy_method(self) -> str:
        """How `copy_runs` copies, for reports: `batch` and `run` ask CUDA's runtime, `torch` and `cpu` ask torch."""
        ...

    @property
    def events_alive(self) -> int:
        """Marks that hold resources of the device, spare ones included. Does not grow while as many are in use."""
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

    def adopt_host(self, memory: Buffer) -> torch.Tensor:
        """uint8 [bytes of `memory`] over memory that somebody else made, so that copies may read it asynchronously.

        Registered as pinned on CUDA, whole and once: takes seconds, so before the model serves. Read-only memory
        is taken as such; nobody may write to the tensor then. The buffer stays exported as long as the tensor lives.

        Raises:
            ValueError: empty or not contiguous.
            Unavailable: DEVICE_ERROR, also if the device has adopted that memory already.
        """
        ...

    def disown_host(self, adopted: torch.Tensor) -> None:
        """Ends `adopt_host`, and blocks; no copy from it may be under way. Idempotent; `close` does it too."""
        ...

    def copy_runs(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int
    ) -> None:
        """Enqueues page copies from host memory `src` into the arena `dst`, both uint8 and contiguous, as one batch.

        The runs of a batch may execute in any order; no target page may be in it twice. The host bytes are read
        when a copy executes, not now. ValueError for pages that are outside of `dst` or `src`.
        """
        ...

    def zero(self, stream: Stream, dst: torch.Tensor) -> None:
        """Enqueues dst ← 0, for a contiguous uint8 `dst`."""
        ...

    def record(self, stream: Stream) -> Event:
        """Enqueues a mark."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Enqueues a wait: what follows in `stream` executes after `event`. No host wait (I13)."""
        ...

    def close(self) -> None:
        """Lets what is enqueued finish, then ends the device's threads and gives back what it holds. Idempotent."""
        ...


def check_runs(dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int) -> None:
    """ValueError unless every page lies inside: for every implementation of `Device.copy_runs`."""
    if not runs:
        return
    sources, targets, lengths = zip(*runs, strict=True)  # a loop over many runs takes as long as enqueuing them
    fits = max(map(add, sources, lengths)) <= src.numel() // page_bytes
    fits = fits and max(map(add, targets, lengths)) <= dst.numel() // page_bytes
    if not fits or min(sources) < 0 or min(targets) < 0 or min(lengths) < 1:
        raise ValueError(f"copy of pages that are not there: {runs} from {src.numel()} to {dst.numel()} bytes")


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
