"""Packing: the right values in the right places, from bytes whose chunk digests held."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapterd.loader.errors import Code, Refused, Untrusted
from adapterd.loader.formats.safetensors_header import read_header
from adapterd.loader.identity import BasePin, FileEntry
from adapterd.loader.layout import Dtype, plan_layout
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.manifest import Manifest, ModuleEntry
from adapterd.loader.pack import NUMPY_DTYPE, pack
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
