"""Merging one weight, a tile of rows at a time: memory is that of some tiles, whatever the weight's size.

The sum is made in float32 (float64 for a float64 base) and rounded once, to the dtype that is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.text import shown
from adapterd.loader.merge.delta import Delta
from adapterd.loader.merge.loss import Loss
from adapterd.loader.merge.matrices import NUMPY, Range, Stored

TILE_VALUES = 1 << 20
"""Values of a tile: 4 MiB of float32, of which some five are alive at a time."""


class Rows(Protocol):
    """A base's weight as it is to be stored, in rows.

    Attributes:
        name: the tensor's name.
        shape: as stored: [out, in], or [in, out] of a Conv1D.
        step: rows are asked for in multiples of it, but for the last ones.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def step(self) -> int: ...
    def rows(self, rows: Range) -> NDArray[Any]:
        """[rows, all columns], float32, or float64 where the base has that."""
        ...


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows of a weight that is stored as floats."""

    stored: Stored
    step: int = 1

    @property
    def name(self) -> str:
        return self.stored.entry.name

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.stored.entry.shape
        return rows, columns

    def rows(self, rows: Range) -> NDArray[Any]:
        wide = np.float64 if self.stored.entry.dtype == "F64" else np.float32
        return self.stored.block(rows).astype(wide)


def tiles_of(source: Rows, tile_values: int) -> Iterator[Range]:
    """Ranges of rows, in order, of at most `tile_values` values each, and of one step at least."""
    count, width = source.shape
    step = max(tile_values // (width * source.step), 1) * source.step
    for first in range(0, count, step):
        yield first, min(first + step, count)


def merged(
    source: Rows, delta: Delta | None, dtype: str, loss: Loss, tile_values: int = TILE_VALUES
) -> Iterator[bytes]:
    """The weight's new bytes, tile by tile; without a delta it is only rounded.

    Args:
        dtype: of the result, by safetensors' word.
        loss: takes in what became of the delta.

    Raises:
        Refused: NONFINITE where a value is not finite, or too large for `dtype`.
    """
    for rows in tiles_of(source, tile_values):
        old = source.rows(rows)
        if delta is None:
            yield _rounded(old, dtype, source.name).tobytes()
            continue
        new = np.empty(old.shape, NUMPY[dtype])
        for columns in _columns(old.shape[1], delta.columns_at_once):
            part = slice(*columns)
            change = delta.block(rows, columns)
            new[:, part] = _rounded(old[:, part] + change, dtype, source.name)
            before = _rounded(old[:, part], dtype, source.name)
            loss.add(change, new[:, part].astype(change.dtype) - before.astype(change.dtype))
        yield new.tobytes()


def _columns(width: int, step: int) -> Iterator[Range]:
    for first in range(0, width, step):
        yield first, min(first + step, width)


def _rounded(values: NDArray[Any], dtype: str, name: str) -> NDArray[Any]:
    """To nearest even."""
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(NUMPY[dtype])
    if not np.isfinite(result).all():
        raise error(
            Code.NONFINITE, shown(name), f"a value of the merged weight is not finite in {dtype}",
            "Float16 ends at 65504: merge into a base of bfloat16 or float32, or lower the adapter's scaling.",
        )  # fmt: skip
    return result
