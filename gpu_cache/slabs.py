"""Host memory as the device's copies want it: a tensor over each slab that images are in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from adapterd.gpu_cache.device import Device
from adapterd.gpu_cache.host.interface import Slab

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlab:
    """Slab in host memory of the device's own making (`allocate_host`)."""

    tensor: torch.Tensor
    page_bytes: int

    @property
    def memory(self) -> Any:
        return self.tensor.numpy().data


class SlabTensors:
    """Tensors by slab. A slab of another kind is adopted once, and given back when a newer one has come.

    Adopting takes seconds where memory is registered with a driver, so it is done where that may be: when the
    cache is made, and in a thread of its own; never under the cache's lock, and in no step.
    """

    def __init__(self, device: Device, first: Slab) -> None:
        """Raises Unavailable (DEVICE_ERROR)."""
        self._device, self._lock = device, Lock()
        self._adopted: dict[int, tuple[Slab, torch.Tensor]] = {}
        self._uses: dict[int, int] = {}
        self.adopt(first)

    def adopt(self, slab: Slab, users: AbstractContextManager[object] | None = None) -> None:
        """Makes `tensor` work for this slab. Raises Unavailable (DEVICE_ERROR).

        Args:
            users: a lock; none of them looks at a slab while others are struck off. Held for that alone.
        """
        if isinstance(slab, DeviceSlab):
            return
        with self._lock:
            if id(slab) in self._adopted:
                return
            with users or nullcontext():
                idle = [key for key in self._adopted if not self._uses.get(key)]
                struck = [self._adopted.pop(key) for key in idle]
            for _, tensor in struck:
                self._device.disown_host(tensor)
            self._adopted[id(slab)] = (slab, self._device.adopt_host(slab.memory))

    def knows(self, slab: Slab) -> bool:
        """Whether `tensor` works for it."""
        return isinstance(slab, DeviceSlab) or id(slab) in self._adopted

    def tensor(self, slab: Slab) -> torch.Tensor:
        """uint8 [bytes of the slab]; KeyError if it was not adopted."""
        if isinstance(slab, DeviceSlab):
            return slab.tensor
        return self._adopted[id(slab)][1]

    def use(self, slab: Slab, copies: int) -> None:
        """So many copies more read from it (fewer, if negative). With the cache's lock held."""
        self._uses[id(slab)] = self._uses.get(id(slab), 0) + copies
