"""The header reader, and beside it the safetensors library on the same bytes.

An input is one byte of form and the rest. Form 0: the rest is the whole file. Form 1: two bytes of data size,
then the header's text; prefix and data are made to fit, so that a mutated text still reaches the rules.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from safetensors import SafetensorError, deserialize, safe_open

from adapterd.loader.errors import Refused
from adapterd.loader.formats.files import BytesReader
from adapterd.loader.formats.safetensors_header import DTYPE_BITS, Header, read_header
from adapterd.loader.limits import DEFAULT_LIMITS
from fuzz.target import Defect, Target
from strategies.headers import HeaderFile, header_files

FILE, TEXT = b"\0", b"\1"
# Memory, where there is such a disk: a file is written for each accepted header.
_SHM = Path("/dev/shm")
_SCRATCH = (_SHM if os.access(_SHM, os.W_OK) else Path(gettempdir())) / f"adapterd-fuzz-{os.getpid()}.safetensors"

_Tensors = dict[str, tuple[str, tuple[int, ...]]]


def as_input(made: HeaderFile) -> bytes:
    """A drawn header as an input of this target."""
    return FILE + made.file


def file_of(data: bytes) -> bytes:
    """The safetensors file that an input stands for."""
    if data[:1] == TEXT and len(data) >= 3:
        return HeaderFile(data[3:], int.from_bytes(data[1:3], "little")).file
    return data[1:]


def run(data: bytes) -> str:
    """Compare both readers on one file."""
    file = file_of(data)
    reader = BytesReader(file)
    try:
        header = read_header(reader, DEFAULT_LIMITS)
    except Refused as refusal:
        if not str(refusal).isascii():
            raise Defect(f"a refusal that is not ASCII: {refusal!r}") from refusal
        return f"{'stricter ' if _library_takes(file) else ''}{refusal.code}"
    _must_cover(header)
    _must_agree(file, header)
    return "accepted"


def _library_takes(file: bytes) -> bool:
    try:
        deserialize(file)
    except SafetensorError:
        return False
    return True


def _must_cover(header: Header) -> None:
    """Every byte of data belongs to just one tensor, of just its size."""
    at = header.data_start
    for tensor in header.tensors:
        bits = DTYPE_BITS[tensor.dtype]
        for dim in tensor.shape:
            bits *= dim
        if tensor.begin != at or (tensor.end - tensor.begin) * 8 != bits:
            raise Defect(f"{tensor} does not lie at {at}")
        at = tensor.end
    if at != header.file_size:
        raise Defect(f"the tensors end at {at} of {header.file_size}")


def _must_agree(file: bytes, header: Header) -> None:
    try:
        bodies: list[tuple[str, dict[str, Any]]] = deserialize(file)
        described, metadata = _opened(file)
    except SafetensorError as refusal:
        raise Defect(f"accepted here, refused by the library: {refusal}") from refusal
    ours: _Tensors = {t.name: (t.dtype, t.shape) for t in header.tensors}
    if described != ours:
        raise Defect(f"tensors: {ours} here, {described} by the library")
    if metadata != dict(header.metadata):
        raise Defect(f"metadata: {header.metadata} here, {metadata} by the library")
    bytes_of = {t.name: file[t.begin : t.end] for t in header.tensors}
    if {name: bytes(info["data"]) for name, info in bodies} != bytes_of:
        raise Defect("offsets: the library reads other bytes")


def _opened(file: bytes) -> tuple[_Tensors, dict[str, str]]:
    """Dtypes, shapes and metadata as `safe_open` gives them, the library's other way in."""
    _SCRATCH.write_bytes(file)
    try:
        with safe_open(_SCRATCH, framework="numpy") as opened:
            views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            described = {n: (str(v.get_dtype()), tuple(v.get_shape())) for n, v in views.items()}
            return described, dict(opened.metadata() or {})
    finally:
        _SCRATCH.unlink()


def seeds() -> dict[str, bytes]:
    """Small files for atheris to start from."""

    def text(header: object, size: int) -> bytes:
        return TEXT + size.to_bytes(2, "little") + json.dumps(header, separators=(",", ":")).encode()

    a = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    b = {"dtype": "BF16", "shape": [2, 1], "data_offsets": [16, 20]}
    return {
        "empty": text({}, 0),
        "pair": text({"__metadata__": {"format": "pt"}, "m.lora_A.weight": a, "m.lora_B.weight": b}, 20),
        "scalar": text({"s": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]}}, 8),
        "no_element": text({"s": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, 0),
        "hole": text({"b": b}, 20),
        "file": FILE + HeaderFile(json.dumps({"a": a}).encode(), 16).file,
        "pickle": FILE + b"\x80\x04\x95\x05\0\0\0\0\0\0\0\x8c\x01a.",
    }


TARGET = Target(
    "header",
    run,
    header_files().map(as_input),
    ("adapterd.loader.formats",),
    (
        b'"dtype":', b'"shape":', b'"data_offsets":', b'"__metadata__":', b'"F32"', b'"BF16"', b'"F4"', b"-0", b"1e0",
        b"0.0", b"\\u0061", b"\\ud800", b"18446744073709551616", b"null", b"true", b"NaN", b"[]", b"{}", b"[0,16]",
    ),
)  # fmt: skip
