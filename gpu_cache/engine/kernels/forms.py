"""What a linear is to the kernels: its widths, its slices, and where its cells begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from adapterd.gpu_cache.engine.device_tables import DeviceTables


@dataclass(frozen=True, slots=True)
class Form:
    """What a linear's launches depend on; layers of one form share everything but addresses.

    Attributes:
        in_features, out_features: of the live layer.
        slices: (first column, width) of each served module in it.
        rows: rank rows of a block.
    """

    in_features: int
    out_features: int
    slices: tuple[tuple[int, int], ...]
    rows: int

    @property
    def step(self) -> int:
        """The largest power of two up to 16 that divides every offset and width: what columns are counted in."""
        step = 16
        while any(offset % step or width % step for offset, width in self.slices):
            step //= 2
        return step

    def strips(self, columns: int) -> list[tuple[int, int, int, int]]:
        """(slice, first column in it, first column of the output, width), the last three in `step`s."""
        step = self.step
        return [
            (index, begin // step, (offset + begin) // step, width // step)
            for index, (offset, width) in enumerate(self.slices)
            for begin in range(0, width, columns)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """One live layer: its form, and where the cells of its slices begin. Known by identity."""

    form: Form
    a: Tensor
    b: Tensor
    scales: Tensor


def linear_of(form: Form, tables: DeviceTables, matrix: int) -> Linear:
    """The layer whose slices are the matrices from `matrix` on."""
    shape = tables.shape
    at = matrix * shape.entries
    words = tables.cells.view(torch.float32)
    return Linear(form, tables.cells[at:], tables.cells[shape.plane + at :], words[2 * (2 * shape.plane + at) :])
