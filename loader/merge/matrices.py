"""Blocks of matrices as they lie in safetensors files, read by position: no matrix is ever in memory whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.files import FileReader
from adapterd.loader.formats.text import shown
from adapterd.loader.manifest import TensorEntry

NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}  # fmt: skip
"""What is read here, by safetensors' words."""

ITEM_BYTES = {
    **{word: dtype.itemsize for word, dtype in NUMPY.items()},
    "I64": 8, "U64": 8, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Bytes of a value, where values have whole bytes."""

MOST_FEATURES = 1 << 21
"""Inputs, or outputs, of a packed weight: some rows of it are in memory at a time, and the group of each input."""

Range = tuple[int, int]
"""First, and the one after the last."""


def check_features(path: str, *counts: int) -> None:
    """Raises Refused (SHAPE_MISMATCH): a packed weight has no inputs or outputs, or more than are held in memory."""
    if not all(0 < count <= MOST_FEATURES for count in counts):
        message = f"is a packed weight of {' × '.join(map(str, counts))} features, each may be 1 to {MOST_FEATURES}"
        raise error(Code.SHAPE_MISMATCH, shown(path), message)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in one open file.

    Attributes:
        file: the file's name in its folder.
        entry: name, dtype, shape, and where its bytes are in the file.
    """

    file: str
    entry: TensorEntry
    reader: FileReader

    def block(self, rows: Range, columns: Range | None = None) -> NDArray[Any]:
        """A block of a matrix, in its own dtype: one read if the rows are whole, else one a row.

        Raises:
            Refused: ST_TRUNCATED, FILE_CHANGED.
        """
        width = self.entry.shape[1]
        first, last = columns or (0, width)
        if (first, last) == (0, width):
            return self._read(rows[0] * width, (rows[1] - rows[0]) * width).reshape(-1, width)
        found = np.empty((rows[1] - rows[0], last - first), NUMPY[self.entry.dtype])
        for i, row in enumerate(range(*rows)):
            found[i] = self._read(row * width + first, last - first)
        return found

    def flat(self) -> NDArray[Any]:
        """All values of a small tensor, in order."""
        return self._read(0, math.prod(self.entry.shape))

    def _read(self, first: int, count: int) -> NDArray[Any]:
        dtype = NUMPY[self.entry.dtype]
        data = self.reader.read_at(self.entry.begin + first * dtype.itemsize, count * dtype.itemsize)
        return np.frombuffer(data, dtype)
