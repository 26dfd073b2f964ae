"""The strict header: one test a rule, then headers that Hypothesis makes up and breaks."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterd.loader.errors import Code, Refused
from adapterd.loader.formats.files import BytesReader
from adapterd.loader.formats.library_check import agree_with_library
from adapterd.loader.formats.safetensors_header import (
    DTYPE_BITS,
    Header,
    check_length,
    header_span,
    parse_header,
    read_header,
)
from adapterd.loader.limits import DEFAULT_LIMITS, Limits

A, B = "base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight"


def entry(dtype: str = "F32", shape: Any = (4, 2), offsets: Any = (0, 32)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def pair() -> dict[str, Any]:
    return {"__metadata__": {"format": "pt"}, A: entry(), B: entry(shape=(2, 4), offsets=(32, 64))}


def file(header: Any, data: int = 64, *, length: int | None = None) -> BytesReader:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return BytesReader(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))


def refusal(reader: BytesReader, limits: Limits = DEFAULT_LIMITS) -> Code:
    with pytest.raises(Refused) as caught:
        read_header(reader, limits)
    return caught.value.code


def test_offsets_are_told_from_the_start_of_the_file() -> None:
    reader = file(pair())
    header = read_header(reader, DEFAULT_LIMITS)
    assert header.file_size == reader.size == header.data_start + 64
    assert [(t.name, t.dtype, t.shape) for t in header.tensors] == [(A, "F32", (4, 2)), (B, "F32", (2, 4))]
    assert [(t.begin - header.data_start, t.end - header.data_start) for t in header.tensors] == [
        (0, 32),
        (32, 64),
    ]
    assert header.metadata == {"format": "pt"}


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    swapped = {A: entry(offsets=(32, 64)), B: entry(shape=(2, 4), offsets=(0, 32))}
    assert [t.name for t in read_header(file(swapped), DEFAULT_LIMITS).tensors] == [B, A]


def test_a_scalar_and_no_tensors_at_all_are_sound_files() -> None:
    assert read_header(file({A: entry(shape=(), offsets=(0, 4))}, 4), DEFAULT_LIMITS).tensors[0].shape == ()
    assert read_header(file({}, 0), DEFAULT_LIMITS).tensors == ()


def test_padding_is_spaces() -> None:
    text = json.dumps(pair()).encode()
    assert read_header(file(text + b"      "), DEFAULT_LIMITS).tensors
    assert refusal(file(text + b"\0\0")) is Code.ST_HEADER_INVALID
    assert refusal(file(b" " + text)) is Code.ST_HEADER_INVALID


def changed(name: str = A, **fields: Any) -> dict[str, Any]:
    header = pair()
    header[name] |= fields
    return header


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (b"[1]", Code.ST_HEADER_INVALID),
        (b"{", Code.ST_HEADER_INVALID),
        ({A: 3}, Code.ST_HEADER_INVALID),
        ({A: {"dtype": "F32", "shape": [4, 2]}}, Code.ST_HEADER_INVALID),
        (changed(extra=1), Code.ST_HEADER_INVALID),
        (pair() | {"__metadata__": {"a": 1}}, Code.ST_METADATA),
        (pair() | {"__metadata__": None}, Code.ST_METADATA),
        (pair() | {"__metadata__": {"a": "x" * 70_000}}, Code.ST_METADATA),
        (changed(dtype="F12"), Code.ST_BAD_DTYPE),
        (changed(dtype="f32"), Code.ST_BAD_DTYPE),
        (changed(dtype=32), Code.ST_BAD_DTYPE),
        (changed(dtype=["F32"]), Code.ST_BAD_DTYPE),
        (changed(shape=[4, -2]), Code.ST_BAD_SHAPE),
        (changed(shape=[4, 2.0]), Code.ST_BAD_SHAPE),
        (changed(shape=[True, 8]), Code.ST_BAD_SHAPE),
        (changed(shape="42"), Code.ST_BAD_SHAPE),
        (changed(shape=[4, 2, 1, 1, 1]), Code.ST_BAD_SHAPE),
        (changed(shape=[0, 2]), Code.EMPTY_TENSOR),
        (changed(shape=[2**32, 2**32]), Code.ST_OVERFLOW),
        (changed(shape=[10**30, 1]), Code.ST_OVERFLOW),
        (changed(shape=[2**21, 2]), Code.QUOTA_EXCEEDED),
        (changed(data_offsets=[32, 0]), Code.ST_OFFSET_RANGE),
        (changed(data_offsets=[-32, 0]), Code.ST_OFFSET_RANGE),
        (changed(data_offsets=[0, 32.0]), Code.ST_OFFSET_RANGE),
        (changed(data_offsets=[False, 32]), Code.ST_OFFSET_RANGE),
        (changed(data_offsets=[0, 16, 32]), Code.ST_OFFSET_RANGE),
        (changed(data_offsets=[2**63, 2**63 + 32]), Code.ST_OFFSET_RANGE),
        (changed(data_offsets=None), Code.ST_OFFSET_RANGE),
        (changed(shape=[4, 3]), Code.ST_SIZE_MISMATCH),
        (changed(dtype="F16"), Code.ST_SIZE_MISMATCH),
        (changed(dtype="F6_E2M3", shape=[3], data_offsets=[0, 2]), Code.ST_SIZE_MISMATCH),
        (changed(B, data_offsets=[31, 63]), Code.ST_OFFSET_OVERLAP),
        (changed(B, data_offsets=[0, 32]), Code.ST_OFFSET_OVERLAP),
        (changed(B, data_offsets=[33, 65]), Code.ST_OFFSET_HOLE),
        ({A: entry(offsets=(32, 64))}, Code.ST_OFFSET_HOLE),
        ({A: entry()}, Code.ST_TRAILING_BYTES),
        (changed(B, shape=[4, 4], data_offsets=[32, 96]), Code.ST_TRUNCATED),
    ],
)
def test_each_rule_has_its_code(header: Any, code: Code) -> None:
    assert refusal(file(header)) is code


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        "a b",
        "a\n",
        "a\0",
        "q_pr\u043ej",
        "\uff51",
        "../x",
        "a/b",
        "a\\b",
        "x" * 513,
    ],
)
def test_names_are_dotted_ascii(name: str) -> None:
    assert refusal(file({name: entry(shape=(16,), offsets=(0, 64))})) is Code.ST_BAD_NAME


def test_a_refusal_names_the_tensor_on_one_line() -> None:
    with pytest.raises(Refused) as caught:
        read_header(file({"a\n\u202e" * 40: entry(shape=(16,), offsets=(0, 64))}), DEFAULT_LIMITS)
    where = caught.value.problem.where
    assert where.startswith("a\\n\\u202e")
    assert where.isascii()
    assert len(where) <= 120


def test_the_length_prefix_is_judged_before_anything_is_read() -> None:
    class Deaf:
        """A reader of a large file, of which more than the first bytes may not be asked for."""

        size = 1 << 40

        def read_at(self, offset: int, length: int) -> bytes:
            assert offset + length <= 32
            return (struct.pack("<Q", 1 << 39) + b"{" + bytes(23))[offset : offset + length]

    with pytest.raises(Refused) as caught:
        header_span(Deaf(), DEFAULT_LIMITS)
    assert caught.value.code is Code.ST_HEADER_TOO_LARGE


@pytest.mark.parametrize(
    ("start", "size", "code"),
    [
        (b"", 0, Code.ST_TRUNCATED),
        (b"\x10" + bytes(6), 7, Code.ST_TRUNCATED),
        (bytes(8), 8, Code.ST_HEADER_INVALID),
        (struct.pack("<Q", 1) + b"{", 9, Code.ST_HEADER_INVALID),
        (struct.pack("<Q", 3) + b"{}", 10, Code.ST_TRUNCATED),
        (struct.pack("<Q", 2**64 - 1) + b"{}", 10, Code.ST_HEADER_TOO_LARGE),
    ],
)
def test_a_length_that_lies(start: bytes, size: int, code: Code) -> None:
    assert len(start) == size
    assert refusal(BytesReader(start)) is code


@pytest.mark.parametrize(
    ("start", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"PK\x03\x04" + bytes(60), "torch.save"),
        (b"GGUF\3\0\0\0" + bytes(60), "GGUF"),
    ],
)
def test_other_formats_are_called_by_their_name(start: bytes, word: str) -> None:
    with pytest.raises(Refused) as caught:
        read_header(BytesReader(start), DEFAULT_LIMITS)
    assert caught.value.code in (Code.ST_HEADER_INVALID, Code.ST_TRUNCATED)
    assert word in caught.value.problem.message or caught.value.code is Code.ST_TRUNCATED
    assert caught.value.problem.hint


def test_a_header_whose_length_looks_like_a_pickle_is_read() -> None:
    text = json.dumps(pair()).encode()
    text += b" " * (0x0280 - len(text))  # little-endian 80 02, how a pickle of protocol 2 begins
    assert struct.pack("<Q", len(text)).startswith(b"\x80\x02")
    assert len(read_header(file(text), DEFAULT_LIMITS).tensors) == 2


def test_the_header_can_be_judged_before_the_data_has_come() -> None:
    reader = file(pair())
    span = check_length(reader.read_at(0, 8), reader.size, DEFAULT_LIMITS)
    header = parse_header(reader.read_at(0, span), reader.size, DEFAULT_LIMITS)
    assert header == read_header(reader, DEFAULT_LIMITS)


def test_limits_are_told_from_the_header_alone() -> None:
    many = {f"t{i}": entry("U8", (1,), (i, i + 1)) for i in range(9)}
    assert refusal(file(many, 9), Limits(max_tensors=8)) is Code.QUOTA_EXCEEDED
    assert refusal(file(pair()), Limits(max_header_bytes=40)) is Code.ST_HEADER_TOO_LARGE
    assert refusal(file(pair()), Limits(max_name_bytes=8)) is Code.ST_BAD_NAME
    assert refusal(file(pair()), Limits(max_dim=3)) is Code.QUOTA_EXCEEDED


def test_46000_tensors_are_read_in_one_pass() -> None:
    """Each header byte once and no data byte; `benchmarks/validation.py` has the time it takes."""
    modules = [f"model.layers.{i // 230}.mlp.experts.{i % 230}.up_proj" for i in range(23_000)]
    names = [f"base_model.model.{m}.lora_{side}.weight" for m in modules for side in "AB"]
    header = {n: entry("BF16", (16, 2048), (i << 16, (i + 1) << 16)) for i, n in enumerate(names)}

    class Huge:
        """The header of a 3 GB file; its data is never asked for."""

        def __init__(self, text: bytes) -> None:
            self._start = struct.pack("<Q", len(text)) + text
            self.size = len(self._start) + (46_000 << 16)
            self.reads: list[int] = []

        def read_at(self, offset: int, length: int) -> bytes:
            self.reads.append(length)
            return self._start[offset : offset + length]

    reader = Huge(json.dumps(header).encode())
    parsed = read_header(reader, DEFAULT_LIMITS)
    assert len(parsed.tensors) == 46_000
    assert reader.reads == [32, parsed.data_start]  # a look at the length, then the header
    agree_with_library(reader, parsed)


# ------------------------------------------------------------------ made up by Hypothesis

names = st.lists(st.text("abcXYZ019_-", min_size=1, max_size=6), min_size=1, max_size=4).map(".".join)
whole_byte_dtypes = st.sampled_from(sorted(d for d, bits in DTYPE_BITS.items() if bits % 8 == 0))
shapes = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A sound header, its entries in any order, and the size of its data."""
    found = draw(st.lists(names, unique=True, max_size=6).map(lambda ns: [n for n in ns if n != "__metadata__"]))
    tensors: dict[str, Any] = {}
    at = 0
    for name in found:
        dtype, shape = draw(whole_byte_dtypes), draw(shapes)
        size = DTYPE_BITS[dtype] // 8
        for dim in shape:
            size *= dim
        tensors[name] = entry(dtype, shape, (at, at + size))
        at += size
    order = draw(st.permutations(found))
    metadata = draw(st.dictionaries(names, st.text(st.characters(codec="utf-8"), max_size=5), max_size=3))
    return ({"__metadata__": metadata} if metadata else {}) | {n: tensors[n] for n in order}, at


@settings(deadline=None)  # the machine may be busy
@given(headers(), st.integers(0, 9))
def test_a_sound_header_is_read_back_and_the_library_agrees(made: tuple[dict[str, Any], int], pad: int) -> None:
    header, size = made
    reader = file(json.dumps(header).encode() + b" " * pad, size)
    parsed = read_header(reader, DEFAULT_LIMITS)
    back = {
        t.name: entry(t.dtype, t.shape, (t.begin - parsed.data_start, t.end - parsed.data_start))
        for t in parsed.tensors
    }
    assert back == {k: v for k, v in header.items() if k != "__metadata__"}
    assert parsed.metadata == header.get("__metadata__", {})
    agree_with_library(reader, parsed)


@settings(max_examples=150, deadline=None)
@given(headers(), st.data())
def test_a_mutated_file_is_refused_or_read_as_the_library_reads_it(
    made: tuple[dict[str, Any], int], data: st.DataObject
) -> None:
    header, size = made
    text = json.dumps(header).encode()
    raw = bytearray(struct.pack("<Q", len(text)) + text + bytes(size))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "repeat", "digit"])):
            case "flip":
                raw[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del raw[at : at + data.draw(st.integers(1, 20))]
            case "repeat":
                raw[at:at] = raw[at : at + data.draw(st.integers(1, 20))]
            case "digit":
                raw[at] = data.draw(st.sampled_from(b'0123456789,:"[]{}'))
        if not raw:
            break
    reader = BytesReader(bytes(raw))
    try:
        parsed = read_header(reader, DEFAULT_LIMITS)
    except Refused as refused:
        assert refused.problem.where.isascii()
        return
    assert covers_the_file(parsed)
    agree_with_library(reader, parsed)


def covers_the_file(header: Header) -> bool:
    """Every byte of data belongs to just one tensor."""
    at = header.data_start
    for tensor in header.tensors:
        if tensor.begin != at:
            return False
        at = tensor.end
    return at == header.file_size


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=200))
def test_any_bytes_give_a_header_or_a_refusal(raw: bytes) -> None:
    for reader in (BytesReader(raw), file(raw), file(b"{" + raw)):
        try:
            assert covers_the_file(read_header(reader, DEFAULT_LIMITS))
        except Refused as refused:
            assert str(refused).isascii()
