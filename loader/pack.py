"""From a verified file to the engine's layout, checking each chunk on the very bytes that are packed.

The chunk list stands in the admission statement, so a byte that changed on disk after the download is
found here, before it can reach VRAM (I1). Peak memory: one chunk, and one matrix of one module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.files import FileReader
from adapterd.loader.identity import WEIGHTS_FILE
from adapterd.loader.layout import Block, Layout
from adapterd.loader.manifest import Manifest, TensorEntry
from adapterd.loader.trust.admission import CHUNK_BYTES

NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def pack(manifest: Manifest, layout: Layout, weights: FileReader, chunks: Sequence[str], out: memoryview) -> None:
    """Fill `out` with the packed form of `weights`.

    Args:
        manifest: of this version; its offsets say where each tensor lies.
        layout: from `plan_layout(manifest, …)`.
        weights: the stored `adapter_model.safetensors`.
        chunks: SHA-256 (hex) of each 4 MiB chunk of that file, from the admission statement.
        out: writable, `layout.nbytes` long. Bytes that belong to no block are zeroed, because the
            memory may have held another tenant's (I10).

    Raises:
        Untrusted: CHUNK_MISMATCH naming the chunk; `out` is then garbage and must not be used.
        Refused: NONFINITE if a finite value does not fit the layout's dtype.
    """
    if len(out) != layout.nbytes:
        raise ValueError(f"out has {len(out)} bytes, the layout needs {layout.nbytes}")
    image = np.frombuffer(out, dtype=np.uint8)
    image[:] = 0
    placed = _by_matrix(layout)
    reader = _CheckedReader(weights, chunks)
    for tensor, module, is_b in _in_file_order(manifest):
        values = _matrix(reader, tensor, layout.dtype)
        rows = values.T if is_b else values
        for block in placed[module, "b" if is_b else "a"]:
            _put(image, layout, block, rows)
    reader.finish()


def _in_file_order(manifest: Manifest) -> list[tuple[TensorEntry, int, bool]]:
    """(tensor, module index, whether it is B), as they lie in the file: the chunks are read once, forwards."""
    both = [(m.a, i, False) for i, m in enumerate(manifest.modules)]
    both += [(m.b, i, True) for i, m in enumerate(manifest.modules)]
    return sorted(both, key=lambda entry: entry[0].begin)


def _by_matrix(layout: Layout) -> dict[tuple[int, str], list[Block]]:
    placed: dict[tuple[int, str], list[Block]] = {}
    for block in layout.blocks:
        placed.setdefault((block.module, block.matrix), []).append(block)
    return placed


def _matrix(reader: _CheckedReader, tensor: TensorEntry, dtype: str) -> NDArray[Any]:
    """The tensor [rows, columns] as elements of `dtype`, rounded to nearest even where that is narrower."""
    raw = np.frombuffer(reader.read(tensor.begin, tensor.end), dtype=NUMPY_DTYPE[tensor.dtype])
    values = raw.reshape(tensor.shape)
    if tensor.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        cast = values.astype(NUMPY_DTYPE[dtype])
    if not np.isfinite(cast).all():
        raise error(
            Code.NONFINITE, tensor.name, f"a value of this {tensor.dtype} tensor does not fit {dtype}",
            "Run the cache with dtype F32 or BF16 for this adapter.",
        )  # fmt: skip
    return cast


def _put(image: NDArray[np.uint8], layout: Layout, block: Block, rows: NDArray[Any]) -> None:
    """Write `rows[row : row + rows]` to the block's place in the image."""
    part = np.ascontiguousarray(rows[block.row : block.row + block.rows])
    begin = block.page * layout.page_bytes + block.offset
    image[begin : begin + part.nbytes] = part.reshape(-1).view(np.uint8)


class _CheckedReader:
    """Reads a file forwards in 4 MiB chunks; hands out bytes only of chunks whose digest held."""

    def __init__(self, weights: FileReader, chunks: Sequence[str]) -> None:
        if len(chunks) != -(-weights.size // CHUNK_BYTES):
            raise error(
                Code.CHUNK_MISMATCH, WEIGHTS_FILE,
                f"the file has {weights.size} bytes, the statement lists {len(chunks)} chunks of {CHUNK_BYTES}",
            )  # fmt: skip
        self._weights = weights
        self._chunks = chunks
        self._next = 0
        self._held: dict[int, bytes] = {}

    def read(self, begin: int, end: int) -> bytes:
        """Bytes [begin, end); calls must come with rising `begin`, and earlier chunks are then forgotten."""
        first, last = begin // CHUNK_BYTES, (end - 1) // CHUNK_BYTES
        for index in [i for i in self._held if i < first]:
            del self._held[index]
        while self._next <= last:
            self._take(keep=self._next >= first)
        parts = [self._held[index] for index in range(first, last + 1)]
        joined = parts[0] if len(parts) == 1 else b"".join(parts)
        return joined[begin - first * CHUNK_BYTES : end - first * CHUNK_BYTES]

    def finish(self) -> None:
        """Check what no tensor needed (a header larger than a chunk, say): the whole file holds, or none of it."""
        while self._next < len(self._chunks):
            self._take(keep=False)

    def _take(self, *, keep: bool) -> None:
        index = self._next
        begin = index * CHUNK_BYTES
        data = self._weights.read_at(begin, min(CHUNK_BYTES, self._weights.size - begin))
        if hashlib.sha256(data).hexdigest() != self._chunks[index]:
            raise error(
                Code.CHUNK_MISMATCH, f"{WEIGHTS_FILE}[{begin}:{begin + len(data)}]",
                f"chunk {index} is not the one that was admitted",
                "Remove the version from the local store; it is fetched and verified again on the next load.",
            )  # fmt: skip
        if keep:
            self._held[index] = data
        self._next = index + 1
