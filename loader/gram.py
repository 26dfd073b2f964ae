"""Gram matrices of stored factors, and the scan for values that are no numbers, in one pass over the bytes.

Magnitudes are compared as the integers that their bits are: IEEE 754 orders finite values, infinities and NaNs
just so, and nothing has to be converted for it.

Products of float32 and float16 values are summed in float64. Those of bfloat16 values have 16 significant bits: they
are exact in float32, which also sums 256 of them almost without rounding (all of it, where they are of one size),
in half the time. The sums of 256 are then added in float64. `rounding` says what that costs.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Stored = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""What adapters may be stored in, by safetensors' words."""

PART_VALUES = 1 << 16
"""Values that are converted and multiplied at a time: 512 KiB of float64 stay in a core's second-level cache."""

CHUNK_ROWS = 256
"""Rows whose products are summed in float32, where they are at all."""

CHUNK_ROUNDING = 4e-7
"""Usual error of such a sum, relative to the norms of its two columns: 256 roundings of 2⁻²⁵ each, most of them of
smaller partial sums, walk 2.2e-7 away; at most four times this was ever seen."""

CHUNK_RANGE = (2.0**-40, 2.0**40)
"""Largest magnitudes for which squares neither overflow float32 nor matter once they underflow."""


class GramSum:
    """MᵀM [r, r] of a factor M [n, r], and its largest magnitude, summed tile by tile.

    Attributes:
        rounding: usual error of an entry relative to the norms of its two columns; 0 for sums in float64.
    """

    def __init__(self, rank: int, *, exact: bool = False) -> None:
        """`exact`: sum everything in float64."""
        self.gram: Matrix = np.zeros((rank, rank))
        self.largest = 0.0
        self.rounding = 0.0
        self._exact = exact

    def add(self, tile: Stored) -> bool:
        """Take in `tile` [n, r], of one of `DTYPES`; False, and nothing to rely on, if a value is not finite."""
        step = max(PART_VALUES // tile.shape[1], CHUNK_ROWS)
        for row in range(0, tile.shape[0], step):
            part = tile[row : row + step]
            top = largest_magnitude(part)
            if not math.isfinite(top):
                return False
            self.largest = max(self.largest, top)
            if top:
                self._sum(part, top)
        return True

    def _sum(self, part: Stored, top: float) -> None:
        if part.dtype == DTYPES["BF16"] and CHUNK_RANGE[0] <= top <= CHUNK_RANGE[1] and not self._exact:
            self.rounding = CHUNK_ROUNDING
            self.gram += _summed_in_chunks(part)
        else:
            values = part.astype(np.float64)
            self.gram += values.T @ values

    @property
    def norm(self) -> float:
        """Frobenius norm of M."""
        return math.sqrt(float(np.trace(self.gram)))


def _summed_in_chunks(part: Stored) -> Matrix:
    """MᵀM of M [n, r]: products in float32, `CHUNK_ROWS` of them summed there, the sums added in float64."""
    values = part.astype(np.float32)  # keeps the layout: rows of M in a row, or its columns
    rows, rank = values.shape
    chunks = rows // CHUNK_ROWS
    whole, rest = values[: chunks * CHUNK_ROWS], values[chunks * CHUNK_ROWS :]
    if values.flags.c_contiguous:
        blocks = whole.reshape(chunks, CHUNK_ROWS, rank)
    else:
        blocks = whole.T.reshape(rank, chunks, CHUNK_ROWS).transpose(1, 2, 0)
    sums = (blocks.transpose(0, 2, 1) @ blocks).sum(axis=0)  # at most 256 more terms, of one size
    added: Matrix = sums.astype(np.float64) + rest.T @ rest
    return added


def largest_magnitude(values: Stored) -> float:
    """The largest magnitude; infinite or NaN if any value is. `values` is not empty."""
    size = values.dtype.itemsize
    unsigned, signed = np.dtype(f"<u{size}"), np.dtype(f"<i{size}")
    sign = 1 << (8 * size - 1)
    # The sign is the highest bit: the largest positive one is the signed maximum, the largest negative one
    # the unsigned maximum.
    positive = max(int(values.view(signed).max()), 0)
    negative = max(int(values.view(unsigned).max()) - sign, 0)
    return float(np.array(max(positive, negative), unsigned).view(values.dtype)[()])
