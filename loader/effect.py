"""What an adapter does, measured without ever forming ΔW = B A: norms, zero effects, non-finite values.

‖BA‖_F² = tr((BᵀB)(AAᵀ)) needs r×r matrices only (trace is invariant under cyclic permutation). The
squares cost half of the digits: where ‖BA‖ is small against ‖A‖‖B‖, the trace is the difference of
large numbers and even comes out negative. Such modules are measured again by triangular factors:
with Aᵀ = Q_A R_A and B = Q_B R_B (Golub & Van Loan, 4th ed., §5.2), ‖BA‖ = ‖R_B R_Aᵀ‖, which squares
nothing and is good to 1e-15·‖A‖‖B‖. Forming BA in tiles would be as exact, but takes in × out × r
steps that a stranger's file can ask for; this takes (in + out) × r².

Memory: one tile and a few r×r matrices, whatever the widths. Sums are good to 1e-6 of the norm (`gram`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from adapterd.loader.gram import DTYPES, GramSum, Matrix, Stored
from adapterd.loader.manifest import TensorEntry

ZERO_RATIO = 1e-7
"""‖BA‖ at or below this part of ‖A‖‖B‖ is rounding of the factors themselves: a zero effect (ARCHITECTURE.md)."""

CANCEL_RATIO = 1e-3
"""Below it the trace is not trusted: its relative error is 2⁻⁵³·‖A‖²‖B‖²/‖BA‖² times a small factor."""

NORM_ROUNDING = 3e-7
"""A norm that float32 sums may have changed by more than this is summed again in float64."""

SMALLEST = float(np.finfo(np.float32).smallest_normal)
"""The engine accumulates in float32: a scaled delta whose norm is below this one does nothing there."""

TILE_VALUES = 1 << 21
"""Values of one tile."""

WHOLE_BYTES = 4 << 20
"""Of an A that is read at once, since its columns lie apart."""

TILE_BYTES = 1 << 20
"""Of one tile of B, which is read at once."""

NORM_DIGITS = 8
"""Digits kept of a norm. The order of a BLAS sum varies between machines; the manifest should not."""


class Source(Protocol):
    """Where the bytes of tensors come from: a `FileReader`, or a part of a file that is in memory."""

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """As `FileReader.read_at`; `offset` counts from the start of the file."""
        ...


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A tensor with values that are no numbers: how many, and the index [row, column] of the first."""

    tensor: str
    count: int
    row: int
    column: int
    value: str


class Zero(StrEnum):
    """Why a module has no effect."""

    B = "lora_B is zero"
    A = "lora_A is zero"
    SCALING = "the scaling is zero"
    PRODUCT = "B · A is zero though neither factor is"
    TINY = "scaling · B · A is too small for float32"


@dataclass(frozen=True, slots=True)
class Effect:
    """What one module's pair does.

    Attributes:
        norm: ‖scaling · B A‖_F; 0.0 without effect. Always finite: three float32 fit a float64.
        cause: why there is no effect at all, or none that float32 can hold; None where there is one.
        ratio: ‖BA‖ / (‖A‖‖B‖), 0 if either is zero. 1/√r or so for independent factors.
        largest: the largest magnitude in A and B.
        gain: root mean square of the output for inputs of mean square one: ‖scaling · B A‖_F / √out.
    """

    norm: float
    cause: Zero | None
    ratio: float
    largest: float
    gain: float

    @property
    def zero(self) -> bool:
        return self.cause is not None


Measured = Effect | NotFinite


def measure(reader: Source, a: TensorEntry, b: TensorEntry, scaling: float) -> Measured:
    """Read A [r, in] and B [out, r] by position and measure the pair.

    Args:
        reader: the tensor file, or the part of it that holds both.
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
        sums = _sums(reader, a, b, exact=False)
        if not isinstance(sums, NotFinite) and _rounding(*sums) > NORM_ROUNDING:
            sums = _sums(reader, a, b, exact=True)
        return sums if isinstance(sums, NotFinite) else _effect(reader, a, b, scaling, sums)


def _sums(reader: Source, a: TensorEntry, b: TensorEntry, *, exact: bool) -> tuple[GramSum, GramSum] | NotFinite:
    rank = a.shape[0]
    sums = GramSum(rank, exact=exact), GramSum(rank, exact=exact)
    for total, tensor, tiles in ((sums[0], a, _tiles_of_a), (sums[1], b, _tiles_of_b)):
        for tile in tiles(reader, tensor):
            if not total.add(tile):
                return _not_finite(reader, tensor)
    return sums


def _rounding(a: GramSum, b: GramSum) -> float:
    """Relative error of ‖BA‖ from sums that were not in float64: the trace's, from errors of its terms that are
    independent of each other, and half of that for the root."""
    if not a.rounding and not b.rounding:
        return 0.0
    norms_a, norms_b = (np.sqrt(np.diag(s.gram)) for s in (a, b))
    terms = a.rounding * np.outer(norms_a, norms_a) * b.gram, b.rounding * np.outer(norms_b, norms_b) * a.gram
    trace = float((a.gram * b.gram).sum())
    error = math.hypot(*(float(np.linalg.norm(t)) for t in terms))
    return math.inf if error and trace <= 0 else error / (2 * trace) if trace else 0.0


def _effect(reader: Source, a: TensorEntry, b: TensorEntry, scaling: float, sums: tuple[GramSum, GramSum]) -> Effect:
    norm_a, norm_b = sums[0].norm, sums[1].norm
    bound = norm_a * norm_b
    norm = math.sqrt(max(float((sums[0].gram * sums[1].gram).sum()), 0.0))
    if norm <= CANCEL_RATIO * bound:
        norm = _norm_by_triangles(reader, a, b)
    ratio = norm / bound if bound else 0.0
    scaled = abs(scaling) * norm
    cause = _cause(sums, scaling, ratio, scaled)
    kept = float(f"{scaled:.{NORM_DIGITS - 1}e}") if cause is None else 0.0
    return Effect(kept, cause, ratio, max(sums[0].largest, sums[1].largest), kept / math.sqrt(b.shape[0]))


def _cause(sums: tuple[GramSum, GramSum], scaling: float, ratio: float, scaled: float) -> Zero | None:
    """The plainest reason first: a B that is all zero is what PEFT starts from."""
    if sums[1].largest == 0.0:
        return Zero.B
    if sums[0].largest == 0.0:
        return Zero.A
    if scaling == 0.0:
        return Zero.SCALING
    if ratio <= ZERO_RATIO:
        return Zero.PRODUCT
    return Zero.TINY if scaled < SMALLEST else None


def _norm_by_triangles(reader: Source, a: TensorEntry, b: TensorEntry) -> float:
    triangle_a = _triangle(_tiles_of_a(reader, a), a.shape[0])
    triangle_b = _triangle(_tiles_of_b(reader, b), a.shape[0])
    return float(np.linalg.norm(triangle_b @ triangle_a.T))


def _triangle(tiles: Iterator[Stored], rank: int) -> Matrix:
    """R of the QR factorisation of all tiles one above the other, taken in one at a time."""
    triangle: Matrix = np.zeros((0, rank))
    for tile in tiles:
        triangle = np.asarray(np.linalg.qr(np.concatenate((triangle, tile.astype(np.float64))), mode="r"))
    return triangle


def _tiles_of_b(reader: Source, b: TensorEntry) -> Iterator[Stored]:
    """B [out, r] in tiles [n, r]: rows lie one after the other, so a tile is one read."""
    out, rank = b.shape
    dtype = DTYPES[b.dtype]
    step = max(min(TILE_VALUES, TILE_BYTES // dtype.itemsize) // rank, 1)
    for row in range(0, out, step):
        rows = min(step, out - row)
        data = reader.read_at(b.begin + row * rank * dtype.itemsize, rows * rank * dtype.itemsize)
        yield np.frombuffer(data, dtype).reshape(rows, rank)


def _tiles_of_a(reader: Source, a: TensorEntry) -> Iterator[Stored]:
    """Aᵀ [in, r] in tiles [n, r]: one read if all of A [r, in] is small enough, else one for each row of a tile."""
    rank, width = a.shape
    dtype = DTYPES[a.dtype]
    step = max(TILE_VALUES // rank, 1)
    whole = np.frombuffer(reader.read_at(a.begin, a.nbytes), dtype) if a.nbytes <= WHOLE_BYTES else None
    for column in range(0, width, step):
        columns = min(step, width - column)
        if whole is not None:
            yield whole.reshape(rank, width)[:, column : column + columns].T
            continue
        starts = (a.begin + (row * width + column) * dtype.itemsize for row in range(rank))
        data = b"".join(reader.read_at(start, columns * dtype.itemsize) for start in starts)
        yield np.frombuffer(data, dtype).reshape(rank, columns).T


def not_finite(reader: Source, tensor: TensorEntry) -> NotFinite | None:
    """The values of a two-dimensional tensor that are no numbers, or None if all are."""
    with np.errstate(all="ignore"):
        found = _not_finite(reader, tensor)
    return found if found.count else None


def _not_finite(reader: Source, tensor: TensorEntry) -> NotFinite:
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
