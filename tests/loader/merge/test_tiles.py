"""One weight, tile by tile: the same sum whatever the tiles, in memory that does not grow with the weight."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.loader.errors import Code, Refused
from adapterd.loader.manifest import ModuleEntry, TensorEntry
from adapterd.loader.merge.delta import Delta
from adapterd.loader.merge.loss import Loss
from adapterd.loader.merge.matrices import Stored
from adapterd.loader.merge.tiles import PlainRows, merged
from fakes.packages import NUMPY_DTYPES
from fakes.readers import Meter

STEP = {"F32": 2.0**-23, "BF16": 2.0**-8, "F16": 2.0**-11, "F64": 2.0**-52}
"""Half a step of rounding relative to the value; for F32 a whole one, as the sum is made in it."""


def case(
    n_out: int, n_in: int, rank: int, dtype: str, *, transposed: bool = False, size: float = 0.1, factor: float = 0.2
) -> tuple[Stored, ModuleEntry, Meter, np.ndarray, np.ndarray]:
    """A stored weight, a module over it with its file, the weight, and its change in float64 as [out, in]."""
    rng = np.random.default_rng(n_out * n_in + rank)
    shape = (n_in, n_out) if transposed else (n_out, n_in)
    weight = rng.normal(0, size, shape).astype(NUMPY_DTYPES[dtype])
    a, b = (rng.normal(0, factor, s).astype(np.float32) for s in ((rank, n_in), (n_out, rank)))
    at = a.nbytes
    module = ModuleEntry(
        "m", rank, 1.0, 1.5, "F32", n_in, n_out,
        TensorEntry("a", "F32", a.shape, 0, at), TensorEntry("b", "F32", b.shape, at, at + b.nbytes),
    )  # fmt: skip
    stored = Stored("f", TensorEntry("m.weight", dtype, shape, 0, weight.nbytes), Meter(weight.tobytes()))
    change = 1.5 * (b.astype(np.float64) @ a.astype(np.float64))
    return stored, module, Meter(a.tobytes() + b.tobytes()), weight, change.T if transposed else change


@given(
    n_out=st.integers(1, 40), n_in=st.integers(1, 40), rank=st.integers(1, 9), tile=st.integers(1, 700),
    transposed=st.booleans(), dtype=st.sampled_from(["F32", "BF16", "F16", "F64"]),
)  # fmt: skip
def test_any_tiles_give_the_rounded_sum(
    n_out: int, n_in: int, rank: int, tile: int, transposed: bool, dtype: str
) -> None:
    stored, module, file, weight, change = case(n_out, n_in, rank, dtype, transposed=transposed)
    delta = Delta(module, file, transposed=transposed, tile_values=tile, exact=dtype == "F64")
    loss = Loss()
    data = b"".join(merged(PlainRows(stored), delta, dtype, loss, tile))
    got = np.frombuffer(data, NUMPY_DTYPES[dtype]).reshape(weight.shape).astype(np.float64)
    wanted = weight.astype(np.float64) + change
    sums = (rank + 2) * (2.0**-52 if dtype == "F64" else 2.0**-24)
    room = (np.abs(weight.astype(np.float64)) + np.abs(change)) * STEP[dtype] * 1.01 + sums
    assert (np.abs(got - wanted) <= room).all()
    assert loss.values == weight.size
    assert loss.delta_max == pytest.approx(np.abs(change).max(), rel=1e-5)
    kept = got - weight.astype(np.float64)
    assert loss.lost_max == pytest.approx(np.abs(change - kept).max(), abs=1e-6)
    assert loss.share == pytest.approx(np.linalg.norm(change - kept) / np.linalg.norm(change), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_memory_and_reads_are_those_of_tiles_whatever_the_size(transposed: bool) -> None:
    tile = 1 << 13
    peaks = []
    for n_out, n_in in ((256, 512), (1024, 2048), (512, 16_384)):
        stored, module, file, weight, _ = case(n_out, n_in, 8, "BF16", transposed=transposed)
        delta = Delta(module, file, transposed=transposed, tile_values=tile)
        tracemalloc.start()
        written = sum(len(part) for part in merged(PlainRows(stored), delta, "BF16", Loss(), tile))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert written == weight.nbytes
        row = stored.entry.shape[1]
        assert isinstance(stored.reader, Meter)
        assert stored.reader.largest <= max(tile, row) * 2
        assert stored.reader.total == weight.nbytes  # once
        assert file.largest <= tile * 4
    assert max(peaks) < 8 * max(tile, 16_384) * 4  # some tiles of float32, for weights of up to 32 MB of it


def test_a_delta_smaller_than_a_step_vanishes_and_is_counted() -> None:
    stored, module, file, weight, _ = case(32, 32, 4, "BF16", size=0.0, factor=1e-3)
    whole = Loss()
    b"".join(merged(PlainRows(stored), Delta(module, file, transposed=False, tile_values=100), "BF16", whole))
    assert not whole.vanished
    assert whole.share < 0.01
    tiny = ModuleEntry("m", 4, 1.0, 1e-9, "F32", 32, 32, module.a, module.b)
    stored, _, file, weight, _ = case(32, 32, 4, "BF16", size=0.1, factor=1e-3)
    gone = Loss()
    data = b"".join(merged(PlainRows(stored), Delta(tiny, file, transposed=False, tile_values=100), "BF16", gone))
    assert data == weight.tobytes()
    assert gone.vanished
    assert gone.share == pytest.approx(1.0)


def test_what_does_not_fit_the_dtype_is_refused() -> None:
    stored, module, file, _, _ = case(8, 8, 2, "F16", size=1e4)
    loud = ModuleEntry("m", 2, 1.0, 1e7, "F32", 8, 8, module.a, module.b)
    with pytest.raises(Refused) as caught:
        b"".join(merged(PlainRows(stored), Delta(loud, file, transposed=False, tile_values=64), "F16", Loss()))
    assert (caught.value.code, caught.value.problem.where) == (Code.NONFINITE, "m.weight")
