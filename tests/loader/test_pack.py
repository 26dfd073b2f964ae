"""Packing: the right values in the right places, from bytes whose chunk digests held."""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.loader.errors import Code, Refused, Untrusted
from adapterd.loader.formats.files import DescriptorReader
from adapterd.loader.formats.safetensors_header import read_header
from adapterd.loader.identity import BasePin, FileEntry
from adapterd.loader.image import PackedImage
from adapterd.loader.layout import Dtype
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry
from adapterd.loader.pack import NUMPY_DTYPE, pack
from adapterd.loader.placing import MOST_TURNED, placings
from adapterd.loader.planning import plan_layout
from adapterd.loader.trust.admission import CHUNK_BYTES
from fakes.packages import safetensors_bytes, tensors_of
from fakes.readers import BytesReader

Factors = dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


def build(factors: Factors) -> tuple[Manifest, bytes]:
    """A file with these factors, and its manifest."""
    data = safetensors_bytes(tensors_of(factors))
    tensors = {t.name: t for t in read_header(BytesReader(data), DEFAULT_LIMITS).tensors}
    entries = []
    for name in sorted(factors):
        a, b = (
            tensors[f"base_model.model.{name}.lora_A.weight"],
            tensors[f"base_model.model.{name}.lora_B.weight"],
        )
        rank, n_in = a.shape
        entries.append(ModuleEntry(name, rank, float(rank), 1.0, a.dtype, n_in, b.shape[0], a, b))
    file = FileEntry("adapter_model.safetensors", hashlib.sha256(data).hexdigest(), len(data))
    return Manifest(BasePin("b/m", "0" * 40, "1" * 64), tuple(entries), (file,)), data


def chunks_of(data: bytes) -> tuple[str, ...]:
    return tuple(hashlib.sha256(data[i : i + CHUNK_BYTES]).hexdigest() for i in range(0, len(data), CHUNK_BYTES))


def random_factors(dtype: str, *shapes: tuple[int, int, int], seed: int = 0) -> Factors:
    rng = np.random.default_rng(seed)
    return {
        f"m{i}": (
            rng.normal(size=(r, n)).astype(NUMPY_DTYPE[dtype]),
            rng.normal(size=(m, r)).astype(NUMPY_DTYPE[dtype]),
        )
        for i, (r, n, m) in enumerate(shapes)
    }


def unpack(manifest: Manifest, dtype: Dtype, out: bytearray, page_bytes: int) -> Factors:
    """Read the factors back from a packed image, by the layout's own words."""
    layout = plan_layout(manifest, dtype, page_bytes)
    found: Factors = {}
    for index, module in enumerate(manifest.modules):
        a = np.zeros((module.rank, module.in_features), NUMPY_DTYPE[dtype])
        bt = np.zeros((module.rank, module.out_features), NUMPY_DTYPE[dtype])
        for block in (b for b in layout.blocks if b.module == index):
            begin = block.page * page_bytes + block.offset
            count = block.rows * block.width
            values = np.frombuffer(out, NUMPY_DTYPE[dtype], count, begin).reshape(block.rows, block.width)
            (a if block.matrix == "a" else bt)[block.row : block.row + block.rows] = values
        found[module.name] = (a, bt.T)
    return found


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("packed", ["F32", "BF16"])
def test_every_value_arrives_in_its_place(stored: str, packed: Dtype) -> None:
    factors = random_factors(stored, (1, 5, 7), (17, 33, 64), (16, 64, 16))
    manifest, data = build(factors)
    layout = plan_layout(manifest, packed, 1 << 13)
    out = bytearray(b"\xff" * layout.nbytes)
    pack(manifest, layout, BytesReader(data), chunks_of(data), memoryview(out))
    for name, (a, b) in unpack(manifest, packed, out, 1 << 13).items():
        np.testing.assert_array_equal(a, factors[name][0].astype(NUMPY_DTYPE[packed]))
        np.testing.assert_array_equal(b, factors[name][1].astype(NUMPY_DTYPE[packed]))


def test_bytes_that_belong_to_no_block_are_zero() -> None:
    manifest, data = build(random_factors("F32", (3, 5, 7)))
    layout = plan_layout(manifest, "F32", 1 << 13)
    out = bytearray(b"\xff" * layout.nbytes)
    pack(manifest, layout, BytesReader(data), chunks_of(data), memoryview(out))
    mask = np.ones(layout.nbytes, bool)
    for block in layout.blocks:
        begin = block.page * layout.page_bytes + block.offset
        mask[begin : begin + block.rows * block.width * 4] = False
    assert mask.any() and not np.frombuffer(out, np.uint8)[mask].any()


def test_each_byte_is_read_once_over_several_chunks() -> None:
    manifest, data = build(random_factors("F32", (64, 20_000, 30_000), (8, 10_000, 10_000)))
    assert len(data) > 3 * CHUNK_BYTES
    layout = plan_layout(manifest, "BF16")
    reader = BytesReader(data)
    pack(manifest, layout, reader, chunks_of(data), memoryview(bytearray(layout.nbytes)))
    assert sum(length for _, length in reader.reads) == len(data)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_byte_is_caught_whichever_chunk_it_is_in(where: str) -> None:
    manifest, data = build(random_factors("F32", (64, 20_000, 30_000)))
    position = {"first": 9, "middle": len(data) // 2, "last": len(data) - 1}[where]
    tampered = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
    layout = plan_layout(manifest, "BF16")
    with pytest.raises(Untrusted) as refused:
        pack(manifest, layout, BytesReader(tampered), chunks_of(data), memoryview(bytearray(layout.nbytes)))
    assert refused.value.code is Code.CHUNK_MISMATCH


def test_a_missing_chunk_digest_is_a_refusal() -> None:
    manifest, data = build(random_factors("F32", (3, 5, 7)))
    layout = plan_layout(manifest, "F32")
    with pytest.raises(Untrusted, match="lists 0 chunks"):
        pack(manifest, layout, BytesReader(data), (), memoryview(bytearray(layout.nbytes)))


def test_a_value_that_does_not_fit_the_narrower_type_is_refused_and_named() -> None:
    factors = random_factors("F32", (3, 5, 7))
    factors["m0"][0][1, 2] = 1e30
    manifest, data = build(factors)
    layout = plan_layout(manifest, "F16")
    with pytest.raises(Refused) as refused:
        pack(manifest, layout, BytesReader(data), chunks_of(data), memoryview(bytearray(layout.nbytes)))
    assert (refused.value.code, refused.value.problem.where) == (
        Code.NONFINITE,
        "base_model.model.m0.lora_A.weight",
    )


def test_a_wrong_buffer_is_the_callers_mistake(tmp_path: Path) -> None:
    manifest, data = build(random_factors("F32", (3, 5, 7)))
    with pytest.raises(ValueError, match="the layout needs"):
        pack(
            manifest,
            plan_layout(manifest, "F32"),
            BytesReader(data),
            chunks_of(data),
            memoryview(bytearray(3)),
        )


def odd_file(*shapes: tuple[int, int, int], dtypes: tuple[str, ...]) -> tuple[Manifest, bytes, Factors]:
    """A file whose tensors begin at odd places: by the header's length, and behind tensors of other types."""
    factors: Factors = {}
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        factors[f"m{i}"] = random_factors(dtype, shape, seed=i)["m0"]
    manifest, data = build(factors)
    (length,) = struct.unpack("<Q", data[:8])
    moved = struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :]

    def move(tensor: TensorEntry) -> TensorEntry:
        return replace(tensor, begin=tensor.begin + 1, end=tensor.end + 1)

    modules = tuple(replace(m, a=move(m.a), b=move(m.b)) for m in manifest.modules)
    return replace(manifest, modules=modules), moved, factors


@pytest.mark.parametrize("packed", ["F32", "BF16"])
@pytest.mark.parametrize("threads", [1, 3])
def test_values_that_lie_across_two_chunks_arrive_too(packed: Dtype, threads: int) -> None:
    shapes, dtypes = ((7, 99_999, 100_001), (40, 40_000, 33_333), (3, 300_001, 300_005)), ("F32", "BF16", "F32")
    manifest, data, factors = odd_file(*shapes, dtypes=dtypes)
    borders = range(CHUNK_BYTES, len(data), CHUNK_BYTES)
    tensors = [(t, 2 if m.dtype == "BF16" else 4) for m in manifest.modules for t in (m.a, m.b)]
    assert len([0 for t, item in tensors for b in borders if t.begin < b < t.end and (b - t.begin) % item]) == 4
    layout = plan_layout(manifest, packed, 1 << 21)
    out = bytearray(b"\xff" * layout.nbytes)
    pack(manifest, layout, BytesReader(data), chunks_of(data), memoryview(out), threads=threads)
    for name, (a, b) in unpack(manifest, packed, out, 1 << 21).items():
        np.testing.assert_array_equal(a, factors[name][0].astype(NUMPY_DTYPE[packed]))
        np.testing.assert_array_equal(b, factors[name][1].astype(NUMPY_DTYPE[packed]))


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 300), st.lists(st.integers(0, 11_000), max_size=6))
def test_stretches_in_any_order_make_the_same_image(rank: int, n_in: int, n_out: int, cuts: list[int]) -> None:
    """`Placing.put` takes any stretch of a tensor's values, whatever rows it begins and ends in."""
    manifest, data = build(random_factors("F32", (rank, n_in, n_out)))
    layout = plan_layout(manifest, "F32", 1 << 14)
    whole, cut = bytearray(layout.nbytes), bytearray(b"\xff" * layout.nbytes)
    pack(manifest, layout, BytesReader(data), chunks_of(data), memoryview(whole))
    for placing in placings(manifest, layout, PackedImage(layout, memoryview(cut))):
        count = placing.tensor.nbytes // 4
        values = np.frombuffer(data, np.uint32, count, placing.tensor.begin)
        ends = [0, *sorted(c % count for c in cuts), count]
        for begin, end in reversed(list(pairwise(ends))):
            if begin < end:
                placing.put(begin, values[begin:end])
    assert cut == whole


def test_pages_from_anywhere_hold_the_same_bytes() -> None:
    manifest, data = build(random_factors("F32", (64, 2_000, 30_000)))
    layout = plan_layout(manifest, "BF16", 1 << 20)
    whole = bytearray(layout.nbytes)
    pages = [memoryview(bytearray(b"\xff" * (1 << 20))) for _ in range(layout.n_pages)]
    pack(manifest, layout, BytesReader(data), chunks_of(data), memoryview(whole))
    pack(manifest, layout, BytesReader(data), chunks_of(data), pages)
    assert b"".join(pages) == whole
    with pytest.raises(ValueError, match="the layout needs"):
        pack(manifest, layout, BytesReader(data), chunks_of(data), pages[1:])


class Crowd(BytesReader):
    """Counts reads that run at once, and has each wait for another one."""

    def __init__(self, data: bytes, threads: int) -> None:
        super().__init__(data)
        self.running = self.most = 0
        self._lock, self._together = threading.Lock(), threading.Barrier(threads)

    def read_at(self, offset: int, length: int) -> bytes:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self._together.wait(timeout=60)
        found = super().read_at(offset, length)
        with self._lock:
            self.running -= 1
        return found


def test_chunks_are_read_beside_each_other_and_one_a_thread_is_in_memory() -> None:
    manifest, data = build(random_factors("F32", (64, 20_000, 41_000)))
    assert len(chunks_of(data)) == 4
    layout = plan_layout(manifest, "BF16")
    reader = Crowd(data, 2)
    pack(manifest, layout, reader, chunks_of(data), memoryview(bytearray(layout.nbytes)), threads=2)
    assert reader.most == 2
    assert max(length for _, length in reader.reads) <= CHUNK_BYTES


# --- bytes that land where they stay


@given(
    st.sampled_from(["F32", "F16", "BF16"]),
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 300), st.integers(1, 1200)), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_what_lands_and_is_turned_is_what_put_makes(
    dtype: Dtype, shapes: list[tuple[int, int, int]], threads: int
) -> None:
    """Blocks of all sizes, several of one tensor and the last one shorter."""
    manifest, data = build(random_factors(dtype, *shapes))
    layout = plan_layout(manifest, dtype, 1 << 18)
    landed, put = bytearray(b"\xff" * layout.nbytes), bytearray(b"\xff" * layout.nbytes)
    pack(manifest, layout, BytesReader(data), chunks_of(data), memoryview(landed), threads=threads)
    for placing in placings(manifest, layout, PackedImage(layout, memoryview(put))):
        assert placing.lands
        placing.put(
            0, np.frombuffer(data, placing.bits, placing.tensor.nbytes // layout_item(dtype), placing.tensor.begin)
        )
    assert landed == put


def layout_item(dtype: Dtype) -> int:
    return NUMPY_DTYPE[dtype].itemsize


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_that_land_across_two_chunks_from_an_odd_place(threads: int) -> None:
    shapes = ((7, 99_999, 140_001), (40, 20_000, 25_001), (3, 300_001, 340_005))
    manifest, data, factors = odd_file(*shapes, dtypes=("F32",) * 3)
    crossing = [t for m in manifest.modules for t in (m.a, m.b) if t.begin // CHUNK_BYTES < (t.end - 1) // CHUNK_BYTES]
    assert len(crossing) >= 3 and any(t.shape[0] > t.shape[1] for t in crossing)
    layout = plan_layout(manifest, "F32", 1 << 21)
    out = bytearray(b"\xff" * layout.nbytes)
    pack(manifest, layout, BytesReader(data), chunks_of(data), memoryview(out), threads=threads)
    for name, (a, b) in unpack(manifest, "F32", out, 1 << 21).items():
        np.testing.assert_array_equal(a, factors[name][0])
        np.testing.assert_array_equal(b, factors[name][1])


def test_a_matrix_too_large_to_be_turned_in_place_is_placed_from_beside() -> None:
    factors = random_factors("BF16", (40, 100, MOST_TURNED // 80 + 1), (40, 100, MOST_TURNED // 80))
    manifest, data = build(factors)
    layout = plan_layout(manifest, "BF16", 1 << 22)
    out = bytearray(b"\xff" * layout.nbytes)
    kinds = placings(manifest, layout, PackedImage(layout, memoryview(out)))
    assert sorted(p.lands for p in kinds) == [False, True, True, True]
    pack(manifest, layout, BytesReader(data), chunks_of(data), memoryview(out))
    for name, (a, b) in unpack(manifest, "BF16", out, 1 << 22).items():
        np.testing.assert_array_equal(a, factors[name][0])
        np.testing.assert_array_equal(b, factors[name][1])


class Late(BytesReader):
    """Its last chunk comes only after another one was asked for."""

    def __init__(self, data: bytes, arrived: threading.Event) -> None:
        super().__init__(data)
        self._arrived = arrived

    def read_at(self, offset: int, length: int) -> bytes:
        if offset + length == self.size:
            assert self._arrived.wait(60)
        else:
            self._arrived.set()
        return super().read_at(offset, length)


def test_who_waits_for_a_chunk_that_does_not_hold_is_let_go() -> None:
    """B lies in both chunks: its task is begun while the second one is still on its way."""
    manifest, data = build(random_factors("F32", (16, 20_000, 60_000)))
    assert len(chunks_of(data)) == 2
    tampered = data[:-1] + bytes([data[-1] ^ 1])
    layout = plan_layout(manifest, "F32", 1 << 22)
    out = bytearray(layout.nbytes)
    reader = Late(tampered, threading.Event())
    with pytest.raises(Untrusted, match="chunk 1"):
        pack(manifest, layout, reader, chunks_of(data), memoryview(out), threads=3)


@pytest.mark.parametrize("packed", ["F32", "F16"])
def test_a_chunk_that_lies_is_named_whatever_its_values_would_do(packed: Dtype) -> None:
    """A forged infinity that the narrower type has no room for is no value of this version's."""
    manifest, data = build(random_factors("F32", (16, 20_000, 60_000)))
    assert len(chunks_of(data)) == 2
    tampered = data[:-4] + struct.pack("<f", 1e30)
    layout = plan_layout(manifest, packed, 1 << 22)
    with pytest.raises(Untrusted, match="chunk 1") as refused:
        pack(manifest, layout, BytesReader(tampered), chunks_of(data), memoryview(bytearray(layout.nbytes)), threads=3)
    assert refused.value.code is Code.CHUNK_MISMATCH


# --- bounded work, on a real file


def system_calls() -> tuple[int, int]:
    """Reads that this process asked the system for so far, and their bytes."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["syscr"]), int(found["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count")
@pytest.mark.parametrize("packed", ["BF16", "F32"])
def test_a_file_is_read_once_and_in_one_call_a_chunk(tmp_path: Path, packed: Dtype) -> None:
    """Whether its tensors land (BF16) or are widened on their way (F32); counting reads costs reads."""
    manifest, data = build(random_factors("BF16", *((16, 4096, 4096),) * 24, (16, 4096, 14336)))
    path = tmp_path / "weights"
    path.write_bytes(data)
    layout = plan_layout(manifest, packed)
    out = memoryview(bytearray(layout.nbytes))
    reader = DescriptorReader(os.open(path, os.O_RDONLY), "weights")
    try:
        begin, middle = system_calls(), system_calls()
        pack(manifest, layout, reader, chunks_of(data), out, threads=2)
        calls, nbytes = (b - a for a, b in zip(middle, system_calls(), strict=True))
    finally:
        reader.close()
    assert calls - (middle[0] - begin[0]) == len(chunks_of(data)) == 2
    assert nbytes - (middle[1] - begin[1]) == pytest.approx(len(data), abs=64)
