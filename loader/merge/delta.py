"""The change of one weight, scaling · B A, block by block and in the weight's own orientation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterd.loader.formats.files import FileReader
from adapterd.loader.identity import WEIGHTS_FILE
from adapterd.loader.manifest import ModuleEntry
from adapterd.loader.merge.matrices import Range, Stored


class Delta:
    """scaling · B A as [out, in], or its transpose for a Conv1D, whose weight is [in, out].

    The scaling is the manifest's, multiplied here and nowhere else (I5). A block is the product of a block of rows
    of one factor and a block of columns of the other; the last one of the latter is kept, for mostly it is the only.
    """

    def __init__(
        self, module: ModuleEntry, weights: FileReader, *, transposed: bool, tile_values: int, exact: bool = False
    ) -> None:
        """
        Args:
            weights: the adapter's tensor file.
            tile_values: the most values of a factor to hold at a time.
            exact: multiply and add in float64 instead of float32.
        """
        self._a, self._b = (Stored(WEIGHTS_FILE, entry, weights) for entry in (module.a, module.b))
        self._transposed = transposed
        self._dtype: np.dtype[Any] = np.dtype(np.float64 if exact else np.float32)
        self._scaling = self._dtype.type(module.scaling)
        self._kept: tuple[Range, NDArray[Any]] | None = None
        self.columns_at_once = max(1, tile_values // module.rank)

    def block(self, rows: Range, columns: Range) -> NDArray[Any]:
        """[rows, columns] of the change, float32 or float64."""
        product: NDArray[Any] = self._left(rows) @ self._right(columns)
        product *= self._scaling
        return product

    def _left(self, rows: Range) -> NDArray[Any]:
        """[rows, rank]."""
        if self._transposed:
            return self._a.block((0, self._a.entry.shape[0]), rows).astype(self._dtype).T
        return self._b.block(rows).astype(self._dtype)

    def _right(self, columns: Range) -> NDArray[Any]:
        """[rank, columns]."""
        if self._kept is None or self._kept[0] != columns:
            self._kept = None  # let go of the last one first
            self._kept = columns, self._read_right(columns)
        return self._kept[1]

    def _read_right(self, columns: Range) -> NDArray[Any]:
        if self._transposed:
            return self._b.block(columns).astype(self._dtype).T
        return self._a.block((0, self._a.entry.shape[0]), columns).astype(self._dtype)
