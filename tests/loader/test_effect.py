"""Norms without ΔW, against the naive product in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterd.loader import effect
from adapterd.loader.effect import Effect, NotFinite, Zero, measure, not_finite
from adapterd.loader.formats.files import BytesReader
from adapterd.loader.manifest import TensorEntry
from fakes.packages import NUMPY_DTYPES


class CountingReader:
    """A reader over bytes that remembers the largest read."""

    def __init__(self, data: bytes) -> None:
        self._inner = BytesReader(data)
        self.largest = 0

    @property
    def size(self) -> int:
        return self._inner.size

    def read_at(self, offset: int, length: int) -> bytes:
        self.largest = max(self.largest, length)
        return self._inner.read_at(offset, length)


def stored(a: np.ndarray, b: np.ndarray, words: tuple[str, str]) -> tuple[CountingReader, TensorEntry, TensorEntry]:
    """B first, then A, so that no offset is zero by luck."""
    raw_b, raw_a = b.tobytes(), a.tobytes()
    entry_b = TensorEntry("b", words[1], b.shape, 8, 8 + len(raw_b))
    entry_a = TensorEntry("a", words[0], a.shape, entry_b.end, entry_b.end + len(raw_a))
    return CountingReader(b"\xff" * 8 + raw_b + raw_a), entry_a, entry_b


def factors(rank: int, n: int, m: int, dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    kind = NUMPY_DTYPES[dtype]
    return rng.normal(0, 0.2, (rank, n)).astype(kind), rng.normal(0, 0.2, (m, rank)).astype(kind)


def measured(a: np.ndarray, b: np.ndarray, scaling: float = 1.0, word: str = "F32") -> Effect:
    found = measure(*stored(a, b, (word, word)), scaling)
    assert isinstance(found, Effect)
    return found


def naive(a: np.ndarray, b: np.ndarray, scaling: float) -> float:
    return abs(scaling) * float(np.linalg.norm(b.astype(np.float64) @ a.astype(np.float64)))


@settings(max_examples=60, deadline=None)
@given(
    rank=st.integers(1, 40),
    n=st.integers(1, 70),
    m=st.integers(1, 70),
    word=st.sampled_from(["F32", "F16", "BF16"]),
    scaling=st.sampled_from([1.0, -2.0, 0.125, 16.0]),
    seed=st.integers(0, 999),
)
def test_norm_is_the_naive_one(rank: int, n: int, m: int, word: str, scaling: float, seed: int) -> None:
    a, b = factors(rank, n, m, word, seed)
    assert measured(a, b, scaling, word).norm == pytest.approx(naive(a, b, scaling), rel=1e-6)


@pytest.mark.parametrize("exponent", range(1, 7))
def test_norm_holds_where_the_gram_matrices_cancel(exponent: int) -> None:
    # Rows of A in equal pairs, columns of B nearly opposite: what is left of BA is 10^-exponent of its parts.
    rng = np.random.default_rng(exponent)
    half = rng.normal(0, 1, (4, 48))
    a = np.repeat(half, 2, axis=0).astype(np.float32)
    big = rng.normal(0, 1, (40, 4))
    b = np.stack([big, big * 10.0**-exponent - big], axis=2).reshape(40, 8).astype(np.float32)
    found = measured(a, b)
    assert not found.zero
    assert found.norm == pytest.approx(naive(a, b, 1.0), rel=1e-6)


@pytest.mark.parametrize(("word", "agreement"), [("F32", 1e-7), ("F16", 1e-7), ("BF16", 1e-6)])
def test_tiles_give_what_one_read_gives(word: str, agreement: float, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = factors(6, 101, 67, word, 5)
    reader, entry_a, entry_b = stored(a, b, (word, word))
    whole = measure(reader, entry_a, entry_b, 2.0)
    monkeypatch.setattr(effect, "TILE_VALUES", 60)
    in_memory = measure(reader, entry_a, entry_b, 2.0)
    monkeypatch.setattr(effect, "WHOLE_BYTES", 0)
    tiled_reader = stored(a, b, (word, word))[0]
    tiled = measure(tiled_reader, entry_a, entry_b, 2.0)
    assert isinstance(whole, Effect)
    assert isinstance(tiled, Effect)
    assert tiled == in_memory
    assert tiled.norm == pytest.approx(whole.norm, rel=agreement)
    top = max(float(np.abs(m.astype(np.float64)).max()) for m in (a, b))
    assert tiled.largest >= top  # exact only where it comes near float16's end
    assert whole.largest >= top
    assert tiled_reader.largest <= 60 * a.itemsize
    assert reader.largest == a.nbytes


def test_tiles_measure_cancelling_factors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effect, "TILE_VALUES", 24)
    a = np.repeat(np.random.default_rng(1).normal(0, 1, (1, 30)), 2, axis=0).astype(np.float32)
    column = np.random.default_rng(2).normal(0, 1, (30, 1)).astype(np.float32)
    b = np.concatenate([column, -column * np.float32(1 - 1e-5)], axis=1)
    assert measured(a, b).norm == pytest.approx(naive(a, b, 1.0), rel=1e-6)


def test_zero_b_zero_scaling_and_orthogonal_factors_are_zero() -> None:
    a, b = factors(4, 32, 16, "F32")
    assert measured(a, np.zeros_like(b)).zero
    assert measured(a, -np.zeros_like(b)).zero
    assert measured(a, b, 0.0).zero
    a[2:], b[:, :2] = 0, 0  # A lives in the first two ranks, B in the last two
    found = measured(a, b)
    assert found.zero
    assert found.norm == 0.0


def test_a_zero_product_of_dense_factors_is_zero_despite_rounding() -> None:
    # Rows of A are equal and columns of B sum to rounding noise, so the trace is 1e-9 or negative.
    rng = np.random.default_rng(3)
    a = np.repeat(rng.normal(0, 1, (1, 64)), 3, axis=0).astype(np.float32)
    x, y = rng.normal(0, 1, (2, 64, 1)).astype(np.float32)
    b = np.concatenate([x, y, -(x.astype(np.float64) + y)], axis=1).astype(np.float32)
    assert naive(a, b, 1.0) > 0
    assert measured(a, b).zero


def test_a_product_below_float32_is_zero_and_a_small_one_is_not() -> None:
    a, b = factors(4, 32, 16, "F32")
    assert measured(a * np.float32(1e-25), b * np.float32(1e-25)).zero
    small = measured(a * np.float32(1e-10), b * np.float32(1e-10))
    assert not small.zero
    assert small.norm == pytest.approx(naive(a * np.float32(1e-10), b * np.float32(1e-10), 1.0), rel=1e-6)


def test_largest_float32_values_do_not_overflow() -> None:
    top = np.finfo(np.float32).max
    a, b = np.full((2, 8), top, np.float32), np.full((8, 2), top, np.float32)
    found = measured(a, b)
    assert math.isfinite(found.norm)
    assert found.norm == pytest.approx(naive(a, b, 1.0), rel=1e-6)
    assert found.largest == float(top)


@pytest.mark.parametrize("word", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (2, 17), (3, 31)])
def test_values_that_are_no_numbers_are_found_where_they_are(word: str, value: float, place: tuple[int, int]) -> None:
    a, b = factors(4, 32, 16, word)
    a[place] = value
    found = measure(*stored(a, b, (word, word)), 1.0)
    assert found == NotFinite("a", 1, place[0], place[1], str(float(value)))


def test_not_finite_values_are_counted_in_stored_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effect, "TILE_VALUES", 40)
    a, b = factors(4, 32, 16, "F32")
    b[3, 1], b[9, 0], b[15, 3] = math.inf, math.nan, math.nan
    assert measure(*stored(a, b, ("F32", "F32")), 1.0) == NotFinite("b", 3, 3, 1, "inf")


def test_factors_of_two_dtypes_are_read_each_in_its_own() -> None:
    a, _ = factors(4, 32, 16, "F32")
    _, b = factors(4, 32, 16, "BF16")
    found = measure(*stored(a, b, ("F32", "BF16")), 1.0)
    assert isinstance(found, Effect)
    assert found.norm == pytest.approx(naive(a, b, 1.0), rel=1e-6)


def test_ranks_that_differ_are_misuse() -> None:
    a, _ = factors(4, 32, 16, "F32")
    _, b = factors(5, 32, 16, "F32")
    with pytest.raises(ValueError, match="rank"):
        measure(*stored(a, b, ("F32", "F32")), 1.0)


def test_the_reason_for_no_effect_is_the_plainest_one() -> None:
    a, b = factors(4, 32, 16, "F32")
    assert measured(a, np.zeros_like(b)).cause is Zero.B
    assert measured(np.zeros_like(a), np.zeros_like(b), 0.0).cause is Zero.B
    assert measured(np.zeros_like(a), b).cause is Zero.A
    assert measured(a, b, 0.0).cause is Zero.SCALING
    assert measured(a * np.float32(1e-25), b * np.float32(1e-25)).cause is Zero.TINY
    a[2:], b[:, :2] = 0, 0
    assert measured(a, b).cause is Zero.PRODUCT


def test_the_gain_is_what_inputs_of_size_one_come_out_as() -> None:
    a, b = factors(4, 64, 48, "F32")
    x = np.random.default_rng(7).normal(0, 1, (20_000, 64))
    out = 3.0 * (x @ a.astype(np.float64).T) @ b.astype(np.float64).T
    assert measured(a, b, 3.0).gain == pytest.approx(float(np.sqrt((out**2).mean())), rel=0.02)


def test_a_product_beyond_float32_is_still_a_number() -> None:
    top = np.finfo(np.float32).max
    a, b = np.full((2, 8), top, np.float32), np.full((8, 2), top, np.float32)
    found = measured(a, b, float(top))
    assert math.isfinite(found.norm)
    assert math.isfinite(found.gain)
    assert found.norm > float(top)


def test_one_tensor_is_scanned_alone() -> None:
    a, b = factors(4, 32, 16, "F16")
    b[15, 3] = math.inf
    reader, entry_a, entry_b = stored(a, b, ("F16", "F16"))
    assert not_finite(reader, entry_a) is None
    assert not_finite(reader, entry_b) == NotFinite("b", 1, 15, 3, "inf")
