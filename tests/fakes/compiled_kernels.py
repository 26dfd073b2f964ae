"""A kernel as Triton makes it: compiled for the arguments that it is called with, wrong for others.

Launches are noted instead of run. A compiled one that is called with arguments of which it was told otherwise fails,
where a card would read and write what nobody meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class FakeKernel:
    """A `direct.Kernel`.

    Attributes:
        compiled: by what they are specialised for.
        ordinary: launches that have come through `kernel[grid](…)`.
        launches: all, as (grid, stream or None, the first tensor's address).
    """

    def __init__(self, arg_names: Sequence[str]) -> None:
        self.arg_names = arg_names
        self.compiled: dict[tuple[object, ...], FakeCompiled] = {}
        self.ordinary = 0
        self.launches: list[tuple[tuple[int, ...], int | None, int]] = []

    def __getitem__(self, grid: tuple[int, ...], /) -> Callable[..., Any]:
        def launch(*arguments: Tensor | int, **constants: object) -> FakeCompiled:
            self.ordinary += 1
            key = (*map(specialised, arguments), *sorted(constants.items()))
            types = [argument.dtype if isinstance(argument, Tensor) else int for argument in arguments]
            compiled = self.compiled.setdefault(key, FakeCompiled(self, [specialised(one) for one in arguments], types))
            self.launches.append((grid, None, addresses(arguments)[0]))
            return compiled

        return launch


class FakeCompiled:
    """What `kernel[grid](…)` gives back."""

    function, packed_metadata = 4711, (4, 1, 0)

    def __init__(self, kernel: FakeKernel, told: list[tuple[bool, bool]], types: Sequence[object]) -> None:
        self._kernel, self._told, self.types = kernel, told, types

    def run(
        self, x: int, y: int, z: int, stream: int, function: int, metadata: object, launch_metadata: object,
        enter_hook: object, exit_hook: object, *arguments: int,
    ) -> None:  # fmt: skip
        assert (function, metadata) == (self.function, self.packed_metadata)
        assert launch_metadata is enter_hook is exit_hook is None
        assert len(arguments) == len(self._kernel.arg_names), "constants are counted, too"
        found = [specialised(argument) for argument in arguments[: len(self._told)]]
        assert found == self._told, "compiled for other arguments"
        self._kernel.launches.append(((x, y, z), stream, arguments[0]))


def specialised(argument: Tensor | int) -> tuple[bool, bool]:
    number = argument.data_ptr() if isinstance(argument, Tensor) else argument
    return number % 16 == 0, number == 1


def addresses(arguments: Sequence[Tensor | int]) -> list[int]:
    return [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]


def at_offset(count: int, offset: int) -> Tensor:
    """fp32 whose address is `offset` bytes beyond a multiple of 16."""
    raw = torch.zeros(count + 8)
    begin = (-raw.data_ptr() % 16 + offset) // 4
    return raw[begin : begin + count]
