"""Host memory that somebody else made, as tensors: what every device needs for `adopt_host`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True, eq=False)
class Adopted:
    """Memory at `address`, `nbytes` long. `tensor` is over it, whether or not it may be written."""

    address: int
    nbytes: int
    read_only: bool
    tensor: torch.Tensor


class _Writable:
    """Says that memory may be written: torch warns of anything else, though nobody here writes."""

    def __init__(self, array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self._array = array  # keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


class AdoptedMemory:
    """What a device has adopted, by address."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._found: dict[int, Adopted] = {}

    def add(self, memory: Buffer) -> Adopted:
        """Raises as `Device.adopt_host` does."""
        view = memoryview(memory)
        if not view.nbytes or not view.c_contiguous:
            raise ValueError("memory to adopt must be contiguous and not empty")
        array = np.frombuffer(view, dtype=np.uint8)
        address = array.__array_interface__["data"][0]
        if address in self._found:
            raise error(Code.DEVICE_ERROR, self._device, "this memory is adopted already", "Adopt a slab once.")
        with torch.inference_mode(False):
            tensor = torch.from_numpy(np.asarray(_Writable(array)))
        adopted = Adopted(address, view.nbytes, view.readonly, tensor)
        self._found[address] = adopted
        return adopted

    def drop(self, tensor: torch.Tensor) -> Adopted | None:
        """What `tensor` stood for; None if it is not adopted, or not any more."""
        return self._found.pop(tensor.data_ptr(), None)

    def drop_all(self) -> list[Adopted]:
        found = list(self._found.values())
        self._found.clear()
        return found
