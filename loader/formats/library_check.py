"""The second parser: the `safetensors` library must read the same header as ours (ARCHITECTURE, Mechanisms)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from adapterd.loader.disk import storage_code
from adapterd.loader.errors import Code, Unavailable, error, reject
from adapterd.loader.formats.files import FileReader
from adapterd.loader.formats.safetensors_header import Header
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import WEIGHTS_FILE


def agree_with_library(reader: FileReader, header: Header) -> None:
    """Let the `safetensors` library parse the very bytes of `header`, and compare what it understood.

    The library opens paths only, and wants the file's whole length. It gets a sparse temporary file: the
    header's bytes as they were read, then a hole of the data's size. So nothing but the header is read or
    written, and no path of a stranger is opened a second time.

    Raises:
        Refused: ST_PARSERS_DISAGREE.
        Unavailable: STORAGE_FULL, STORAGE_UNAVAILABLE where no temporary file can be made.
    """
    start = reader.read_at(0, header.data_start)
    with _temporary_folder() as folder:
        path = Path(folder, "header.safetensors")
        try:
            with path.open("wb") as sparse:
                sparse.write(start)
                sparse.truncate(header.file_size)
        except OSError as failure:
            raise _no_space(failure) from None
        _compare(_as_the_library_reads(path), header)


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="adapterd-header-")
    except OSError as failure:
        raise _no_space(failure) from None


def _no_space(failure: OSError) -> Unavailable:
    return Unavailable(reject(storage_code(failure), tempfile.gettempdir(), f"no temporary file: {failure.strerror}"))


_Tensors = list[tuple[str, str, tuple[int, ...]]]


def _as_the_library_reads(path: Path) -> tuple[_Tensors, dict[str, str]]:
    """Name, dtype and shape in the order of the bytes, and the metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as opened:
            return [_described(opened, name) for name in opened.offset_keys()], dict(opened.metadata() or {})
    except SafetensorError as refusal:
        raise error(
            Code.ST_PARSERS_DISAGREE,
            WEIGHTS_FILE,
            f"the safetensors library refuses the header: {shown(refusal)}",
        ) from None


def _described(opened: Any, name: str) -> tuple[str, str, tuple[int, ...]]:
    view = opened.get_slice(name)
    return name, str(view.get_dtype()), tuple(view.get_shape())


def _compare(theirs: tuple[_Tensors, dict[str, str]], header: Header) -> None:
    """Equal names, dtypes and shapes in one order give equal offsets: ours have neither hole nor overlap."""
    tensors, metadata = theirs
    ours = [(t.name, t.dtype, t.shape) for t in header.tensors]
    if tensors != ours:
        where = next((o[0] for o, t in zip(ours, tensors, strict=False) if o != t), WEIGHTS_FILE)
        raise error(Code.ST_PARSERS_DISAGREE, shown(where), "the safetensors library reads another tensor here")
    if metadata != dict(header.metadata):
        raise error(Code.ST_PARSERS_DISAGREE, WEIGHTS_FILE, "the safetensors library reads other metadata")
