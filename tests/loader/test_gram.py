"""Gram matrices in one pass: against float64, in both layouts, and where float32 would not do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterd.loader.gram import CHUNK_ROWS, PART_VALUES, GramSum, largest_magnitude
from fakes.packages import NUMPY_DTYPES

WORDS = ("F32", "F16", "BF16")


def summed(tile: np.ndarray, *, exact: bool = False) -> GramSum:
    total = GramSum(tile.shape[1], exact=exact)
    assert total.add(tile)
    return total


def naive(tile: np.ndarray) -> np.ndarray:
    values = tile.astype(np.float64)
    return values.T @ values


def stored(rows: int, rank: int, word: str, layout: str, seed: int = 0, size: float = 0.2) -> np.ndarray:
    """[rows, rank] as B lies in a file (`rows`), or as A's transpose does (`columns`)."""
    rng = np.random.default_rng(seed)
    shape = (rows, rank) if layout == "rows" else (rank, rows)
    values = rng.normal(0, size, shape).astype(NUMPY_DTYPES[word])
    return values if layout == "rows" else values.T


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from((1, 2, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 3 * CHUNK_ROWS, 5000)),
    rank=st.sampled_from((1, 3, 16, 70)),
    word=st.sampled_from(WORDS),
    layout=st.sampled_from(("rows", "columns")),
    seed=st.integers(0, 99),
)
def test_a_gram_matrix_is_the_naive_one(rows: int, rank: int, word: str, layout: str, seed: int) -> None:
    tile = stored(rows, rank, word, layout, seed)
    found, wanted = summed(tile), naive(tile)
    sizes = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))
    assert np.all(np.abs(found.gram - wanted) <= max(4 * found.rounding, 1e-13) * sizes)
    assert found.norm == pytest.approx(math.sqrt(np.trace(wanted)), rel=1e-6)
    top = float(np.abs(tile.astype(np.float64)).max())
    assert top <= found.largest <= (found.norm * (1 + 1e-6) if word == "BF16" else top)
    assert bool(found.rounding) is (word == "BF16")


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_magnitude_near_the_end_of_float16_is_told_exactly(word: str, layout: str) -> None:
    tile = stored(5000, 5, word, layout).copy()
    tile[4000, 3] = 49152.0
    assert summed(tile).largest == 49152.0
    assert summed(np.zeros_like(tile)).largest == 0.0


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_equal_values_are_summed_without_rounding(layout: str) -> None:
    # A bias would show here: every rounding goes the same way.
    value = np.full((PART_VALUES, 4), 1.9921875, NUMPY_DTYPES["BF16"])
    tile = value if layout == "rows" else np.ascontiguousarray(value.T).T
    assert np.array_equal(summed(tile).gram, naive(tile))


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e6, 1e15, 1e37])
def test_sizes_that_float32_cannot_square_are_summed_in_float64(size: float) -> None:
    tile = stored(600, 4, "BF16", "rows", size=size)
    found = summed(tile)
    assert found.rounding == 0
    np.testing.assert_allclose(found.gram, naive(tile), rtol=1e-12)


def test_exact_is_float64() -> None:
    tile = stored(4000, 8, "BF16", "columns")
    found = summed(tile, exact=True)
    assert found.rounding == 0
    np.testing.assert_allclose(found.gram, naive(tile), rtol=1e-12)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_value_that_is_no_number_is_seen_in_any_part(word: str, value: float, layout: str) -> None:
    for row in (0, 4999, 30_000):
        tile = stored(30_001, 5, word, layout).copy()
        tile[row, 4] = value
        assert not GramSum(5).add(tile)


@pytest.mark.parametrize("word", WORDS)
def test_magnitudes_are_those_of_the_values(word: str) -> None:
    dtype = NUMPY_DTYPES[word]
    for values in ([0.0], [-0.0], [1.0, -2.0], [-1.0, 0.5], [3.0, 2.0, -3.0], [1e-7, -1e-7], [-6e4, 5e4]):
        stored_values = np.array([values], dtype)
        assert largest_magnitude(stored_values) == float(np.abs(stored_values.astype(np.float64)).max())
    assert math.isinf(largest_magnitude(np.array([[-math.inf, 1]], dtype)))
    assert math.isnan(largest_magnitude(np.array([[math.nan, math.inf]], dtype)))
    assert math.isnan(largest_magnitude(np.array([[-math.nan, 1]], dtype)))
