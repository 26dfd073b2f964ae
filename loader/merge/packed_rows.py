"""Packed weights tile by tile: as floats, and back into their own integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.text import shown
from adapterd.loader.merge.delta import Delta
from adapterd.loader.merge.grouped import Grouped
from adapterd.loader.merge.loss import Loss
from adapterd.loader.merge.matrices import Range
from adapterd.loader.merge.quantised import Packed
from adapterd.loader.merge.shards import Patch
from adapterd.loader.merge.tiles import tiles_of


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A packed weight as rows of floats.

    Attributes:
        name: the tensor's new name.
        transposed: a Conv1D's: the rows are inputs.
    """

    name: str
    packed: Packed
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        n_out, n_in = self.packed.shape
        return (n_in, n_out) if self.transposed else (n_out, n_in)

    @property
    def step(self) -> int:
        return self.packed.step

    def rows(self, rows: Range) -> NDArray[np.float32]:
        everything = (0, self.shape[1])
        if self.transposed:
            return self.packed.block(everything, rows).T
        return self.packed.block(rows, everything)


def requantised(weight: Grouped, delta: Delta, loss: Loss, tile_values: int) -> Iterator[Patch]:
    """The merged weight in the base's own integers, tile by tile of outputs.

    Raises:
        Refused: NONFINITE.
    """
    rows = PackedRows(weight.path, weight, transposed=False)
    for outputs in tiles_of(rows, tile_values):
        old = rows.rows(outputs)
        change = _whole_rows(delta, outputs, weight.shape[1])
        exact = old + change
        if not np.isfinite(exact).all():
            raise error(Code.NONFINITE, shown(weight.path), "a value of the merged weight is not finite")
        meant, patches = weight.quantised(outputs, exact)
        loss.add(change, meant - old)
        yield from patches


def _whole_rows(delta: Delta, rows: Range, width: int) -> NDArray[Any]:
    step = delta.columns_at_once
    parts = [delta.block(rows, (first, min(first + step, width))) for first in range(0, width, step)]
    return np.concatenate(parts, axis=1)
