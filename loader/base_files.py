"""A model directory's files: which ones hold the weights, and what their headers say. No tensor is read here."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from adapterd.loader.base_fields import invalid, parse_json, read_open
from adapterd.loader.errors import Code, error
from adapterd.loader.formats.safetensors_header import MAX_COUNT
from adapterd.loader.formats.text import shown
from adapterd.loader.regular_file import NotRegular, open_regular

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_DIMS = 64
"""Of a tensor; numpy takes no more, and torch hardly any as many."""
MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_HEADER_BYTES = 100_000_000
"""The cap of the safetensors library itself (`MAX_HEADER_SIZE`)."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a base, as a header describes it.

    Attributes:
        file: where it is stored.
        name, dtype, shape: as in the header; dtype is safetensors' word, empty if there is none.
        data_offsets: as in the header, unchecked.
        data_start: where the file's data begin.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    data_offsets: object
    data_start: int


def read_config(path: Path) -> dict[str, Any]:
    """`config.json` of the model in `path`. Raises NotFound (PATH_NOT_FOUND), Failed (BASE_TABLE_INVALID)."""
    if not path.is_dir():
        raise error(Code.PATH_NOT_FOUND, str(path), "is not a folder")
    return parse_json(_read(path / CONFIG_FILE, MAX_CONFIG_BYTES), CONFIG_FILE)


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """All tensors of the model in `path`, in one file or in the shards that the index names.

    Raises:
        NotFound: PATH_NOT_FOUND for a missing file.
        Failed: BASE_TABLE_INVALID for malformed files, and shards that are not what the index says.
    """
    index = _weight_map(path)
    seen: dict[str, str] = {}
    for file in sorted(set(index.values())) if index else [SINGLE_FILE]:
        for tensor in _tensors(path / file):
            if tensor.name in seen:
                raise invalid(shown(tensor.name), f"is stored twice, in {seen[tensor.name]} and in {file}")
            seen[tensor.name] = file
            yield tensor
    for name, file in index.items():
        if seen.get(name) != file:
            raise invalid(shown(name), f"{INDEX_FILE} says that it is in {shown(file)}, and it is not")


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor → file of the index; empty where there is none."""
    index = path / INDEX_FILE
    if not index.exists():
        return {}
    listed = parse_json(_read(index, MAX_INDEX_BYTES), INDEX_FILE).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(v, str) for v in listed.values()):
        raise invalid(INDEX_FILE, "has no weight_map of names to files")
    if any("/" in n or "\\" in n or n in {"", ".", ".."} for n in listed.values()):
        raise invalid(INDEX_FILE, "names a file outside the folder")
    if any("\0" in n for n in listed.values()):
        raise invalid(INDEX_FILE, "names a file as no file can be named")
    return listed


def _tensors(path: Path) -> Iterator[StoredTensor]:
    header, start = _header(path)
    for name, info in header.items():
        if name == "__metadata__":
            continue
        shape = info.get("shape") if isinstance(info, dict) else None
        if not isinstance(info, dict) or not isinstance(shape, list):
            raise invalid(shown(name), "has no shape")
        if any(type(d) is not int or d < 0 for d in shape):
            raise invalid(shown(name), "has a shape that is not a list of sizes")
        if len(shape) > MAX_DIMS or max(shape, default=0) > MAX_COUNT:  # nobody multiplies, or writes out, such
            raise invalid(shown(name), "has a shape that no tensor has")
        dtype = info.get("dtype")
        word = dtype if isinstance(dtype, str) else ""
        yield StoredTensor(path, name, word, tuple(shape), info.get("data_offsets"), start)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    try:
        with _opened(path) as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= MAX_HEADER_BYTES:
                raise invalid(path.name, f"a header of {length} bytes")
            data = file.read(length)
    except OSError as e:
        hint = "Pickled weights are never opened; convert them to safetensors."
        raise error(Code.PATH_NOT_FOUND, str(path), f"cannot be read: {e.strerror or e}", hint) from e
    if len(data) != length:
        raise invalid(path.name, "ends inside its header")
    return parse_json(data, path.name), 8 + length


def _read(path: Path, limit: int) -> bytes:
    try:
        with _opened(path) as file:
            return read_open(file, path.name, limit)
    except OSError as e:
        raise error(Code.PATH_NOT_FOUND, str(path), f"cannot be read: {e.strerror or e}") from e


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file of the model. A pipe, or a device, that somebody put into the folder is not waited for, nor read.

    Raises:
        OSError.
        Failed: BASE_TABLE_INVALID for what is no regular file.
    """
    try:
        opened = open_regular(path)
    except NotRegular as e:
        raise invalid(path.name, "is no regular file") from e
    with opened as file:
        yield file
