"""The header of a safetensors file, read strictly (ARCHITECTURE, Mechanisms).

The format: 8 bytes little-endian length n, n bytes of JSON that maps a name to dtype, shape and
data_offsets (counted from the end of the header), then the data. The JSON may be padded with
spaces at its end. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.files import FileReader
from adapterd.loader.formats.json_strict import JsonRules, parse_object
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import WEIGHTS_FILE
from adapterd.loader.limits import Limits
from adapterd.loader.manifest import TensorEntry

LENGTH_BYTES = 8
# Bits of one element, for every dtype that safetensors 0.8 knows.
DTYPE_BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# Matrices and their stacks; the format sets no bound, NumPy stops at 64.
MAX_DIMS = 4
# Above this a byte count does not fit a signed 64-bit file offset.
MAX_COUNT = 2**63 - 1
# Dotted names as torch gives parameters: no separators of paths, no white space, ASCII only.
TENSOR_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
METADATA = "__metadata__"
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_INTEGERS = frozenset({int})  # a bool is another type

# What else is found under the name of a tensor file, and the first bytes that give it away.
_LFS = ("a Git LFS pointer", "Fetch the file itself (git lfs pull) and try again.")
_HTML = ("a web page", "The download went wrong; fetch the file again.")
_PICKLE = ("a pickle", "Pickles are never opened. Save the adapter as safetensors (save_pretrained).")
_OTHER_FORMATS: Mapping[bytes, tuple[str, str]] = {
    b"version https://git-lfs": _LFS,
    b"<!DOCTYPE": _HTML,
    b"<!doctype": _HTML,
    b"<html": _HTML,
    b"GGUF": ("a GGUF file", "Upload the adapter as PEFT wrote it, before conversion."),
    b"PK\x03\x04": ("a zip archive or a torch.save file", _PICKLE[1]),
    b"\x80\x02": _PICKLE,
    b"\x80\x03": _PICKLE,
    b"\x80\x04": _PICKLE,
    b"\x80\x05": _PICKLE,
    b"\x1f\x8b": ("a gzip file", "Unpack it first."),
}


@dataclass(frozen=True, slots=True)
class Header:
    """What the header says, all of it checked.

    Attributes:
        tensors: in the order of their bytes; begin and end count from the start of the file.
        metadata: the strings of `__metadata__`.
        data_start: first byte after the header.
        file_size: in bytes.
    """

    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    data_start: int
    file_size: int


def read_header(reader: FileReader, limits: Limits, *, max_modules: int | None = None) -> Header:
    """Read and check the header; the data is not touched.

    Args:
        max_modules: of an adapter, which has two tensors each and no other: more tensors are refused before
            time is spent on them one by one.

    Raises:
        Refused: one ST_* code a rule; EMPTY_TENSOR for a dimension of 0; QUOTA_EXCEEDED for a limit.
    """
    return parse_header(reader.read_at(0, header_span(reader, limits)), reader.size, limits, max_modules=max_modules)


def header_span(reader: FileReader, limits: Limits) -> int:
    """How many bytes the length prefix and the header take. Raises Refused before anything is allocated."""
    size = reader.size
    if size < LENGTH_BYTES:
        raise error(
            Code.ST_TRUNCATED, WEIGHTS_FILE, f"{size} bytes, the length prefix alone takes {LENGTH_BYTES}",
            "The file is empty or its transfer was cut off; send it again.",
        )  # fmt: skip
    start = reader.read_at(0, min(size, 32))
    _refuse_other_formats(start)
    return check_length(start[:LENGTH_BYTES], size, limits)


def check_length(prefix: bytes, file_size: int, limits: Limits) -> int:
    """Bytes of prefix and header together, from the prefix and the (declared) size of the file."""
    length = int.from_bytes(prefix, "little")
    if length > limits.max_header_bytes:
        raise error(
            Code.ST_HEADER_TOO_LARGE,
            WEIGHTS_FILE,
            f"a header of {length} bytes, at most {limits.max_header_bytes}",
        )
    if LENGTH_BYTES + length > file_size:
        raise error(
            Code.ST_TRUNCATED, WEIGHTS_FILE, f"a header of {length} bytes in a file of {file_size}",
            "The file's transfer was cut off; send it again.",
        )  # fmt: skip
    if length < 2:
        raise error(Code.ST_HEADER_INVALID, WEIGHTS_FILE, f"a header of {length} bytes holds no JSON object")
    return LENGTH_BYTES + length


def parse_header(start: bytes, file_size: int, limits: Limits, *, max_modules: int | None = None) -> Header:
    """The header from the first bytes of the file (prefix and JSON, no more) and the file's (declared) size.

    Args, Raises: see `read_header`.
    """
    span = check_length(start[:LENGTH_BYTES], file_size, limits)
    text = start[LENGTH_BYTES:span]
    del start  # a header may be large, and one copy will do
    if not text.startswith(b"{"):
        raise error(Code.ST_HEADER_INVALID, WEIGHTS_FILE, f"the header begins with {shown(text[:8])}, not with '{{'")
    fields = parse_object(text, _rules(limits))
    metadata = _metadata(fields.pop(METADATA, {}), limits)
    if len(fields) > limits.max_tensors:
        raise error(Code.QUOTA_EXCEEDED, WEIGHTS_FILE, f"{len(fields)} tensors, at most {limits.max_tensors}")
    if max_modules is not None and len(fields) > 2 * max_modules:
        message = f"{len(fields)} tensors, but at most {max_modules} modules of two tensors each are served"
        raise error(Code.QUOTA_EXCEEDED, WEIGHTS_FILE, message)
    tensors = _check_invariants(fields, span, file_size, limits)
    return Header(tensors, metadata, span, file_size)


def _rules(limits: Limits) -> JsonRules:
    return JsonRules(
        where=WEIGHTS_FILE,
        max_bytes=limits.max_header_bytes,
        max_depth=min(limits.max_json_depth, 8),
        # A matrix takes ten: three containers with three, two and two values. An entry of metadata takes one.
        max_values=10 * limits.max_tensors + limits.max_metadata_bytes // 16,
        invalid=Code.ST_HEADER_INVALID,
        duplicate=Code.ST_DUPLICATE_KEY,
        too_deep=Code.ST_HEADER_INVALID,
        too_large=Code.ST_HEADER_TOO_LARGE,
        too_many=Code.QUOTA_EXCEEDED,
        bad_number=Code.ST_HEADER_INVALID,
    )


def _check_invariants(
    fields: Mapping[str, Any], data_start: int, file_size: int, limits: Limits
) -> tuple[TensorEntry, ...]:
    """Every rule of the format and of ARCHITECTURE's Mechanisms, one error each.

    The rules per tensor, in file order: name; fields; dtype; shape; size in bytes without overflow; offsets
    that are a range of just that size. Then, in the order of the bytes: each tensor starts where the one
    before ended, and the last ends at the end of the file.
    """
    found: list[TensorEntry] = []
    for name, info in fields.items():
        _check_name(name, limits)
        dtype, shape, offsets = _info_fields(info, name)
        nbytes = _nbytes(dtype, shape, name, limits)
        begin, end = _offsets(offsets, name)
        if end - begin != nbytes:
            _fail(Code.ST_SIZE_MISMATCH, name, f"takes {nbytes} bytes, data_offsets give it {end - begin}")
        found.append(TensorEntry(name, dtype, shape, data_start + begin, data_start + end))
    found.sort(key=lambda t: (t.begin, t.end))
    expected = data_start
    for tensor in found:
        apart = tensor.begin - expected
        if apart > 0:
            _fail(Code.ST_OFFSET_HOLE, tensor.name, f"{apart} bytes before it belong to no tensor")
        if apart < 0:
            _fail(Code.ST_OFFSET_OVERLAP, tensor.name, f"{-apart} of its bytes belong to another tensor too")
        expected = tensor.end
    if expected > file_size:
        _fail(
            Code.ST_TRUNCATED, WEIGHTS_FILE, f"its header describes {expected} bytes, {file_size} are there",
            "The file's transfer was cut off; send it again.",
        )  # fmt: skip
    if expected < file_size:
        _fail(Code.ST_TRAILING_BYTES, WEIGHTS_FILE, f"{file_size - expected} bytes after the last tensor")
    return tuple(found)


def _fail(code: Code, where: str, message: str, hint: str = "") -> NoReturn:
    """Only here a name is made fit to be shown: 46,000 of them in advance would cost a tenth of a second."""
    raise error(code, shown(where), message, hint)


def _check_name(name: str, limits: Limits) -> None:
    if len(name) > limits.max_name_bytes:
        _fail(Code.ST_BAD_NAME, name, f"a name of {len(name)} characters, at most {limits.max_name_bytes}")
    if not TENSOR_NAME.fullmatch(name):
        _fail(Code.ST_BAD_NAME, name, "a name is made of ASCII letters, digits, '_', '-' and single dots")


def _info_fields(info: object, name: str) -> tuple[str, tuple[int, ...], object]:
    if not isinstance(info, dict):
        _fail(Code.ST_HEADER_INVALID, name, "the tensor's entry is not an object")
    if info.keys() != _FIELDS:
        missing, extra = sorted(_FIELDS - info.keys()), sorted(info.keys() - _FIELDS)
        found = f"missing {', '.join(missing)}" if missing else f"unknown {shown(', '.join(extra))}"
        _fail(Code.ST_HEADER_INVALID, name, f"an entry has dtype, shape and data_offsets and no more; {found}")
    dtype, shape = info["dtype"], info["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _fail(Code.ST_BAD_DTYPE, name, f"unknown dtype {shown(dtype, 40)!r}")
    if not isinstance(shape, list) or not _INTEGERS.issuperset(map(type, shape)) or min(shape, default=0) < 0:
        _fail(Code.ST_BAD_SHAPE, name, f"the shape {shown(shape, 60)} is not a list of counts")
    return dtype, tuple(shape), info["data_offsets"]


def _nbytes(dtype: str, shape: tuple[int, ...], name: str, limits: Limits) -> int:
    if len(shape) > MAX_DIMS:
        _fail(Code.ST_BAD_SHAPE, name, f"{len(shape)} dimensions, at most {MAX_DIMS}")
    if 0 in shape:
        _fail(Code.EMPTY_TENSOR, name, f"the shape {list(shape)} holds no element")
    bits = math.prod(shape, start=DTYPE_BITS[dtype])
    if bits > MAX_COUNT:
        _fail(Code.ST_OVERFLOW, name, f"the shape {shown(list(shape), 80)} asks for more than 2**63 bits")
    if max(shape, default=1) > limits.max_dim:
        _fail(Code.QUOTA_EXCEEDED, name, f"a dimension of {max(shape)}, at most {limits.max_dim}")
    if bits % 8:
        _fail(Code.ST_SIZE_MISMATCH, name, f"{dtype} {list(shape)} does not end at a whole byte")
    return bits // 8


def _offsets(offsets: object, name: str) -> tuple[int, int]:
    if not isinstance(offsets, list) or len(offsets) != 2 or not _INTEGERS.issuperset(map(type, offsets)):
        _fail(Code.ST_OFFSET_RANGE, name, f"data_offsets are two integers, not {shown(offsets, 60)}")
    begin, end = offsets
    if not 0 <= begin <= end <= MAX_COUNT:
        _fail(Code.ST_OFFSET_RANGE, name, f"data_offsets {shown(offsets, 60)} are no range of bytes")
    return begin, end


def _metadata(value: object, limits: Limits) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        _fail(Code.ST_METADATA, METADATA, "must map strings to strings")
    size = sum(len(k.encode()) + len(v.encode()) for k, v in value.items())
    if size > limits.max_metadata_bytes:
        _fail(Code.ST_METADATA, METADATA, f"{size} bytes of metadata, at most {limits.max_metadata_bytes}")
    return value


def _refuse_other_formats(start: bytes) -> None:
    """A better word for what cannot be a header: a length may look like a pickle, but '{' follows it."""
    if start[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{":
        return
    for magic, (what, hint) in _OTHER_FORMATS.items():
        if start.startswith(magic):
            _fail(Code.ST_HEADER_INVALID, WEIGHTS_FILE, f"this is {what}, not a safetensors file", hint)
