"""A simulated device that fails, lies and changes its compute stream when the test says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from adapterd.gpu_cache.device import Device, Event, Stream
from adapterd.loader.errors import Code, error
from fakes.devices import SimulatedDevice, SimulatedEvent


def enqueuing() -> list[str]:
    """The port's methods that take a stream, or streams: whatever can be enqueued can be refused."""
    methods = {n: inspect.signature(m).parameters for n, m in vars(Device).items() if inspect.isfunction(m)}
    return [name for name, parameters in methods.items() if {"stream", "streams"} & set(parameters)]


class FlakyDevice:
    """Everything else is the inner device's.

    Attributes:
        refusals: so many of the next things that are enqueued in copy streams are refused, after `refuse_after`.
        refuse_waits: the same for waits of compute streams.
        blind: the marks of copy streams cannot be asked.
        early: marks of copy streams say at once that they are reached. Only stream order protects readers then.
    """

    def __init__(self, inner: SimulatedDevice, *, early: bool = False) -> None:
        self.inner, self.early = inner, early
        self.refusals = self.refuse_after = self.refuse_waits = 0
        self.blind = False
        self._computes = [inner.compute]
        for name in enqueuing():
            setattr(self, name, self._guarded(name, getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def compute(self) -> Stream:
        return self._computes[0]

    def change_compute(self) -> None:
        """The caller's current stream is another one from now on: the second one, or the first again."""
        if len(self._computes) == 1:
            self._computes.append(self.inner.new_stream())
        self._computes.reverse()

    def _guarded(self, name: str, enqueue: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(stream: Any, *rest: Any) -> Any:
            in_compute = stream in self._computes
            self._maybe_refuse(name, in_compute)
            if name == "record" and not in_compute:
                return self._mark(stream)
            return enqueue(stream, *rest)

        return guarded

    def _maybe_refuse(self, name: str, in_compute: bool) -> None:
        if in_compute:
            refused = name == "wait" and self.refuse_waits > 0
            self.refuse_waits -= refused
        elif self.refusals and self.refuse_after:
            self.refuse_after -= 1
            refused = False
        else:
            refused = self.refusals > 0
            self.refusals -= refused
        if refused:
            raise error(Code.DEVICE_ERROR, "simulated", f"{name} was refused")

    def _mark(self, stream: Stream) -> Event:
        event = _Mark(self)
        self.inner.launch(stream, event.fire)
        return event


class _Mark(SimulatedEvent):
    def __init__(self, device: FlakyDevice) -> None:
        super().__init__()
        self._device = device

    def done(self) -> bool:
        if self._device.blind:
            raise error(Code.DEVICE_ERROR, "simulated", "the event cannot be asked")
        return self.fired or self._device.early
