"""What an adapter does, measured without ever forming ΔW = B A: norms, zero effects, non-finite values.

‖BA‖_F² = tr((BᵀB)(AAᵀ)) needs r×r matrices only (trace is invariant under cyclic permutation). The
squares cost half of the digits: where ‖BA‖ is small against ‖A‖‖B‖, the trace is the difference of
large numbers and even comes out negative. Such modules are measured again by triangular factors:
with Aᵀ = Q_A R_A and B = Q_B R_B (Golub & Van Loan, 4th ed., §5.2), ‖BA‖ = ‖R_B R_Aᵀ‖, which squares
nothing and is good to 1e-15·‖A‖‖B‖. Forming BA in tiles would be as exact, but takes in × out × r
steps that a stranger's file can ask for; this takes (in + out) × r².

Memory: one tile and a few r×r matrices, whatever the widths. Everything is float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from adapterd.loader.formats.files import FileReader
from adapterd.loader.manifest import TensorEntry

Matrix = NDArray[np.float64]

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""What adapters may be stored in, by safetensors' words."""

ZERO_RATIO = 1e-7
"""‖BA‖ at or below this part of ‖A‖‖B‖ is rounding of the factors themselves: a zero effect (ARCHITECTURE.md)."""

CANCEL_RATIO = 1e-3
"""Below it the trace is not trusted: its relative error is 2⁻⁵³·‖A‖²‖B‖²/‖BA‖² times a small factor."""

SMALLEST = float(np.finfo(np.float32).smallest_normal)
"""The engine accumulates in float32: a scaled delta whose norm is below this one does nothing there."""

TILE_VALUES = 1 << 20
"""Values of one tile: 8 MiB in float64."""

NORM_DIGITS = 9
"""Digits kept of a norm. The order of a BLAS sum varies between machines; the manifest should not."""


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A tensor with values that are no numbers: how many, and the index [row, column] of the first."""

    tensor: str
    count: int
    row: int
    column: int
    value: str


@dataclass(frozen=True, slots=True)
class Effect:
    """What one module's pair does.

    Attributes:
        norm: ‖scaling · B A‖_F; 0.0 if `zero`.
        zero: no effect at all, or none that float32 can hold.
        ratio: ‖BA‖ / (‖A‖‖B‖), 0 if either is zero. 1/√r or so for independent factors.
        largest: the largest magnitude in A and B.
    """

    norm: float
    zero: bool
    ratio: float
    largest: float


def measure(reader: FileReader, a: TensorEntry, b: TensorEntry, scaling: float) -> Effect | NotFinite:
    """Read A [r, in] and B [out, r] by position and measure the pair.

    Args:
        reader: the tensor file.
        a, b: two-dimensional, of one of `DTYPES`, with equal r ≥ 1.
        scaling: finite.

    Returns:
        NotFinite for the first tensor with a NaN or an infinity, else the Effect.

    Raises:
        Refused: what `FileReader.read_at` raises for a file that ends early.
    """
    rank = a.shape[0]
    if b.shape[1] != rank:
        raise ValueError(f"A has rank {rank}, B {b.shape[1]}")
    with np.errstate(all="ignore"):  # infinities are counted, not warned of
        sums = _Sums(rank), _Sums(rank)
        for total, tensor, tiles in ((sums[0], a, _tiles_of_a), (sums[1], b, _tiles_of_b)):
            for tile in tiles(reader, tensor):
                if not np.isfinite(tile).all():
                    return _not_finite(reader, tensor)
                total.add(tile)
        return _effect(reader, a, b, scaling, sums)


def _effect(reader: FileReader, a: TensorEntry, b: TensorEntry, scaling: float, sums: tuple[_Sums, _Sums]) -> Effect:
    norm_a, norm_b = sums[0].norm, sums[1].norm
    bound = norm_a * norm_b
    norm = math.sqrt(max(float((sums[0].gram * sums[1].gram).sum()), 0.0))
    if norm <= CANCEL_RATIO * bound:
        norm = _norm_by_triangles(reader, a, b)
    ratio = norm / bound if bound else 0.0
    scaled = abs(scaling) * norm
    zero = ratio <= ZERO_RATIO or scaled < SMALLEST
    kept = 0.0 if zero else float(f"{scaled:.{NORM_DIGITS - 1}e}")
    return Effect(kept, zero, ratio, max(sums[0].largest, sums[1].largest))


class _Sums:
    """The Gram matrix [r, r] of a factor's rank directions and its largest magnitude, summed tile by tile."""

    def __init__(self, rank: int) -> None:
        self.gram: Matrix = np.zeros((rank, rank))
        self.largest = 0.0

    def add(self, tile: Matrix) -> None:
        """`tile` is [n, r]."""
        self.gram += tile.T @ tile
        self.largest = max(self.largest, float(np.abs(tile).max(initial=0.0)))

    @property
    def norm(self) -> float:
        return math.sqrt(float(np.trace(self.gram)))


def _norm_by_triangles(reader: FileReader, a: TensorEntry, b: TensorEntry) -> float:
    triangle_a = _triangle(_tiles_of_a(reader, a), a.shape[0])
    triangle_b = _triangle(_tiles_of_b(reader, b), a.shape[0])
    return float(np.linalg.norm(triangle_b @ triangle_a.T))


def _triangle(tiles: Iterator[Matrix], rank: int) -> Matrix:
    """R of the QR factorisation of all tiles one above the other, taken in one at a time."""
    triangle: Matrix = np.zeros((0, rank))
    for tile in tiles:
        triangle = np.asarray(np.linalg.qr(np.concatenate((triangle, tile)), mode="r"))
    return triangle


def _tiles_of_b(reader: FileReader, b: TensorEntry) -> Iterator[Matrix]:
    """B [out, r] in tiles [n, r]: rows lie one after the other, so a tile is one read."""
    out, rank = b.shape
    dtype = DTYPES[b.dtype]
    step = max(TILE_VALUES // rank, 1)
    for row in range(0, out, step):
        rows = min(step, out - row)
        data = reader.read_at(b.begin + row * rank * dtype.itemsize, rows * rank * dtype.itemsize)
        yield np.frombuffer(data, dtype).reshape(rows, rank).astype(np.float64)


def _tiles_of_a(reader: FileReader, a: TensorEntry) -> Iterator[Matrix]:
    """Aᵀ [in, r] in tiles [n, r]: one read if all of A [r, in] is a tile, else one for each row of A."""
    rank, width = a.shape
    dtype = DTYPES[a.dtype]
    step = max(TILE_VALUES // rank, 1)
    for column in range(0, width, step):
        columns = min(step, width - column)
        if columns == width:
            data = reader.read_at(a.begin, a.nbytes)
        else:
            starts = (a.begin + (row * width + column) * dtype.itemsize for row in range(rank))
            data = b"".join(reader.read_at(start, columns * dtype.itemsize) for start in starts)
        yield np.frombuffer(data, dtype).reshape(rank, columns).T.astype(np.float64)


def _not_finite(reader: FileReader, tensor: TensorEntry) -> NotFinite:
    """Count in stored order, so that the answer does not depend on how tiles lie."""
    dtype = DTYPES[tensor.dtype]
    width = tensor.shape[1]
    count, first, value = 0, -1, ""
    for start in range(0, tensor.shape[0] * width, TILE_VALUES):
        length = min(TILE_VALUES, tensor.shape[0] * width - start)
        data = reader.read_at(tensor.begin + start * dtype.itemsize, length * dtype.itemsize)
        values = np.frombuffer(data, dtype).astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(values))
        if first < 0 and bad.size:
            first, value = start + int(bad[0]), str(float(values[bad[0]]))
        count += int(bad.size)
    return NotFinite(tensor.name, count, first // width, first % width, value)
