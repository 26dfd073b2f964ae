"""Launches of kernels that are compiled already, past Triton's own way in.

`kernel[grid](…)` looks at every argument to find out which compiled kernel it wants, and reads the address of every
tensor: 20 µs in Python. It ends in one call of that kernel's launcher. Here all arguments but one, the layer's own
tensor, are the same from call to call. So the compiled kernel is found once, and called with addresses as numbers.

A compiled kernel is right only for arguments like those that it was made for. Triton goes by dtypes, by addresses and
numbers that 16 divides, by numbers that are 1, and by constants and options: keys hold all of them. The address of the
layer's tensor is looked at in each call: one that 16 does not divide goes the ordinary way. So does everything where a
hook wants to see launches, on other cards than CUDA's, in the interpreter, and in versions of Triton whose launchers
nobody here has read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

ALIGNED = 16
"""Bytes; addresses of a multiple of it are what kernels are compiled for."""
LAUNCHERS_READ = frozenset({"3.6", "3.7"})
"""Versions of Triton: `run(grid x, y, z, stream, function, metadata, launch metadata, two hooks, every argument)`."""
_VERSION = ".".join(triton.__version__.split(".")[:2])
OFFERED: bool = _VERSION in LAUNCHERS_READ and torch.version.hip is None and not triton.knobs.runtime.interpret
_HOOKS = triton.knobs.runtime
Argument = Tensor | int


class Kernel(Protocol):
    """What `triton.jit` makes of a function, for as long as the process lives."""

    @property
    def arg_names(self) -> Sequence[str]: ...

    def __getitem__(self, grid: tuple[int, ...], /) -> Callable[..., Any]:
        """Called with the arguments: launches in the current stream, and gives what it has compiled."""


class Direct:
    """What has been compiled for one device, by all that specialises it."""

    def __init__(self) -> None:
        self.compiled: dict[tuple[object, ...], Any] = {}

    def call(
        self, kernel: Kernel, grid: tuple[int, ...], others: Sequence[Argument], constants: Mapping[str, Any]
    ) -> Call:
        """The launch of `kernel` for any first argument.

        Args:
            others: its further arguments, in order. They stay what and where they are.
            constants: its constants and options, by name.
        """
        return Call(self.compiled, kernel, grid, others, constants)


class Call:
    """From `Direct.call`. Keeps all tensors alive."""

    def __init__(
        self,
        compiled: dict[tuple[object, ...], Any],
        kernel: Kernel,
        grid: tuple[int, ...],
        others: Sequence[Argument],
        constants: Mapping[str, Any],
    ) -> None:
        self._compiled, self._kernel, self._grid = compiled, kernel, grid
        self._others, self._constants = others, constants
        self._ready: tuple[Any, ...] | None = None

    def __call__(self, tensor: Tensor, stream: int | None) -> None:
        """Launch it for `tensor`, of the same dtype in every call.

        Args:
            stream: the device's current one; None for the ordinary way.
        """
        address, ready = tensor.data_ptr(), self._ready
        if stream is None or address % ALIGNED:
            self._kernel[self._grid](tensor, *self._others, **self._constants)
        elif ready is None:
            self._first(tensor, stream)
        else:
            run, x, y, z, function, metadata, others = ready
            run(x, y, z, stream, function, metadata, None, None, None, address, *others)

    def _first(self, tensor: Tensor, stream: int) -> None:
        key = (id(self._kernel), tensor.dtype, *map(_specialised, self._others), *self._constants.items())
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._kernel[self._grid](tensor, *self._others, **self._constants)
            if compiled is not None:  # a hook may keep Triton from compiling
                self._compiled[key], self._ready = compiled, self._bound(compiled)
        else:
            self._ready = self._bound(compiled)
            self(tensor, stream)

    def _bound(self, compiled: Any) -> tuple[Any, ...]:
        """All that its launcher takes, but the stream and the first address. It reads no constant, but counts them."""
        names = self._kernel.arg_names[1:]
        named = {**self._constants, **dict(zip(names, self._others, strict=False))}
        arguments = tuple([_address(named[name]) for name in names])
        x, y, z = (*self._grid, 1, 1)[:3]
        return compiled.run, x, y, z, compiled.function, compiled.packed_metadata, arguments


def watched() -> bool:
    """Whether hooks want to see every launch, as those of Triton's profiler do."""
    enter, leave = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _address(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def _specialised(argument: Argument) -> tuple[object, ...]:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNED == 0
    return argument % ALIGNED == 0, argument == 1, argument.bit_length() > 31  # the last: 64 bits wide
