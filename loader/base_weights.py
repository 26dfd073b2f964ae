"""The digest of a base's weights, on request: it reads all of them, which takes as long as the disk does.

It is about tensors, not files, so that sharding a model anew, or a note in a header's metadata, leaves it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from adapterd.loader.base_fields import invalid
from adapterd.loader.base_files import StoredTensor, stored_tensors
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import canonical_json, sha256_hex
from adapterd.loader.regular_file import open_regular

WEIGHTS_TYPE = "adapterd.weights/1"
_CHUNK = 4 << 20

Progress = Callable[[int], None]


def weights_bytes(path: Path) -> int:
    """Bytes of all tensors of the model in `path`. Raises as `weights_digest`."""
    return sum(end - begin for begin, end in map(_span, stored_tensors(path)))


def weights_digest(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 (hex) of the RFC 8785 form of `{"tensors": [{"dtype", "name", "sha256", "shape"} …], "type":
    "adapterd.weights/1"}`, sorted by the bytes of name, for the model in the folder `path`.

    Args:
        progress: called with the number of bytes read since the last call.

    Raises:
        NotFound: PATH_NOT_FOUND. Failed: BASE_TABLE_INVALID for malformed files.
    """
    tell = progress or (lambda _: None)
    listed = []
    for file, tensors in groupby(stored_tensors(path), key=lambda t: t.file):
        listed += _file_entries(file, list(tensors), tell)
    listed.sort(key=lambda entry: str(entry["name"]).encode())
    return sha256_hex(canonical_json({"tensors": listed, "type": WEIGHTS_TYPE}))


def _file_entries(path: Path, tensors: list[StoredTensor], progress: Progress) -> list[dict[str, object]]:
    """In the order of the bytes, so that a file is read once, from start to end."""
    try:
        with open_regular(path) as file:
            return [_entry(file, tensor, progress) for tensor in sorted(tensors, key=_span)]
    except OSError as e:
        raise error(Code.PATH_NOT_FOUND, str(path), f"cannot be read: {e.strerror or e}") from e


def _entry(file: BinaryIO, tensor: StoredTensor, progress: Progress) -> dict[str, object]:
    begin, end = _span(tensor)
    if end > os.fstat(file.fileno()).st_size:  # by far, perhaps: no file has a place of that number
        raise _too_short(tensor)
    digest = hashlib.sha256()
    file.seek(begin)
    left = end - begin
    while left:
        data = file.read(min(left, _CHUNK))
        if not data:
            raise _too_short(tensor)
        digest.update(data)
        progress(len(data))
        left -= len(data)
    shape = list(tensor.shape)
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": shape, "sha256": digest.hexdigest()}


def _too_short(tensor: StoredTensor) -> AdapterdError:
    return invalid(shown(tensor.name), f"{tensor.file.name} ends inside this tensor")


def _span(tensor: StoredTensor) -> tuple[int, int]:
    """First byte in the file, and the one after the last."""
    match tensor.data_offsets:
        case [int(begin), int(end)] if 0 <= begin <= end:
            return tensor.data_start + begin, tensor.data_start + end
    raise invalid(shown(tensor.name), "has no data_offsets")
