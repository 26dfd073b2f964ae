"""Gram matrices of stored factors, and the scan for values that are no numbers, in one pass over the bytes.

Magnitudes are compared as the integers that their bits are: IEEE 754 orders finite values, infinities and NaNs
just so, and nothing has to be converted for it.

Products of float32 and float16 values are summed in float64. Those of bfloat16 values have 16 significant bits: they
are exact in float32, which also sums 512 of them almost without rounding (all of it, where they are of one size),
in half the time. The sums of 512 are then added in float64. `rounding` says what that costs.
"""

from __future__ import annotations

import math
import threading
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

PART_VALUES = 1 << 20
"""Values that are converted and multiplied at a time: 4 MiB of float32. Smaller parts hand the interpreter's lock
from thread to thread more often than they save in the caches."""

CHUNK_ROWS = 512
"""Rows whose products are summed in float32, where they are at all."""

CHUNK_ROUNDING = 6e-7
"""Usual error of such a sum, relative to the norms of its two columns: 512 roundings of 2⁻²⁵ each, most of them of
smaller partial sums, walk 3.1e-7 away; at most four times this was ever seen."""

CHUNK_RANGE = (2.0**-40, 2.0**15)
"""Largest norms of a column for which no square overflows float32, or matters once it underflows, and for which no
value comes near the end of float16: above, the largest magnitude is looked for."""


class GramSum:
    """MᵀM [r, r] of a factor M [n, r], and its largest magnitude, summed tile by tile.

    Attributes:
        largest: the largest magnitude where that is above 2¹⁵, zero where all is zero; else no less than it.
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
        parts = (tile[row : row + step] for row in range(0, tile.shape[0], step))
        return all(self._add_quickly(part) or self._add_exactly(part) for part in parts)

    def _add_quickly(self, part: Stored) -> bool:
        """Take in what float32 can sum; False, and nothing taken in, for anything else."""
        if self._exact or part.dtype != DTYPES["BF16"]:
            return False
        with np.errstate(all="ignore"):  # what does not fit is seen by what comes out
            sums = _summed_in_chunks(part)
        top = math.sqrt(float(np.diag(sums).max()))  # NaN or infinite if any value is
        if not CHUNK_RANGE[0] <= top <= CHUNK_RANGE[1]:
            return False
        self.rounding = CHUNK_ROUNDING
        self.largest = max(self.largest, top)
        self.gram += sums
        return True

    def _add_exactly(self, part: Stored) -> bool:
        top = largest_magnitude(part)
        if not math.isfinite(top):
            return False
        self.largest = max(self.largest, top)
        if top:
            values = part.astype(np.float64)
            self.gram += values.T @ values
        return True

    @property
    def norm(self) -> float:
        """Frobenius norm of M."""
        return math.sqrt(float(np.trace(self.gram)))


class _Scratch(threading.local):
    """A thread's memory for parts, written over by each: fresh memory for every part would cost more than its reading.

    Attributes:
        values, sums: float32, grown to the largest part so far.
    """

    def __init__(self) -> None:
        self.values = np.empty(PART_VALUES, np.float32)
        self.sums = np.empty(0, np.float32)

    def single(self, part: Stored) -> NDArray[np.float32]:
        """`part` [n, r] in float32, in the layout that it has: rows of M in a row, or its columns."""
        if self.values.size < part.size:
            self.values = np.empty(part.size, np.float32)
        by_rows = part.strides[1] <= part.strides[0]
        flat = self.values[: part.size]
        values = flat.reshape(part.shape) if by_rows else flat.reshape(part.shape[::-1]).T
        np.copyto(values, part)
        return values

    def products(self, chunks: int, rank: int) -> NDArray[np.float32]:
        """Room for `chunks` matrices [r, r]."""
        size = chunks * rank * rank
        if self.sums.size < size:
            self.sums = np.empty(size, np.float32)
        return self.sums[:size].reshape(chunks, rank, rank)


_scratch = _Scratch()


def _summed_in_chunks(part: Stored) -> Matrix:
    """MᵀM of M [n, r]: products in float32, `CHUNK_ROWS` of them summed there, the sums added in float64."""
    values = _scratch.single(part)
    rows, rank = values.shape
    chunks = rows // CHUNK_ROWS
    whole, rest = values[: chunks * CHUNK_ROWS], values[chunks * CHUNK_ROWS :]
    if values.flags.c_contiguous:
        blocks = whole.reshape(chunks, CHUNK_ROWS, rank)
    else:
        blocks = whole.T.reshape(rank, chunks, CHUNK_ROWS).transpose(1, 2, 0)
    products = np.matmul(blocks.transpose(0, 2, 1), blocks, out=_scratch.products(chunks, rank))
    sums: Matrix = products.sum(axis=0, dtype=np.float64)
    return sums + rest.T @ rest


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
