"""From a verified file to the engine's layout, checking each chunk on the very bytes that are packed.

The chunk list stands in the admission statement, so a byte that changed on disk after the download is
found here, before it can reach VRAM (I1). Chunks are independent of each other: a few threads read, hash
and place them beside each other. Peak memory: two chunks a thread.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.files import FileReader
from adapterd.loader.identity import WEIGHTS_FILE
from adapterd.loader.image import Memory, PackedImage
from adapterd.loader.layout import ITEM_BYTES, Layout
from adapterd.loader.manifest import Manifest, TensorEntry
from adapterd.loader.parallel import default_threads, for_each
from adapterd.loader.placing import Placing, placings
from adapterd.loader.trust.admission import CHUNK_BYTES

NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_LONGEST_ITEM = max(ITEM_BYTES.values())


def pack(
    manifest: Manifest,
    layout: Layout,
    weights: FileReader,
    chunks: Sequence[str],
    out: Memory,
    *,
    threads: int | None = None,
) -> None:
    """Fill `out` with the packed form of `weights`.

    Args:
        manifest: of this version; its offsets say where each tensor lies.
        layout: from `plan_layout(manifest, …)`.
        weights: the stored `adapter_model.safetensors`; read by several threads at once.
        chunks: SHA-256 (hex) of each 4 MiB chunk of that file, from the admission statement.
        out: writable, `layout.nbytes` long in all. Bytes that belong to no block are zeroed, because the
            memory may have held another tenant's (I10).
        threads: how many work on it; None for one a processor, eight at most.

    Raises:
        Untrusted: CHUNK_MISMATCH naming the chunk; `out` is then garbage and must not be used.
        Refused: NONFINITE if a finite value does not fit the layout's dtype.
    """
    packing = _Packing(manifest, layout, weights, chunks, PackedImage(layout, out))
    for_each(len(chunks), packing.take_chunk, threads or default_threads())
    packing.finish()


class _Packing:
    """One call of `pack`."""

    def __init__(
        self, manifest: Manifest, layout: Layout, weights: FileReader, chunks: Sequence[str], image: PackedImage
    ) -> None:
        if len(chunks) != -(-weights.size // CHUNK_BYTES):
            raise error(
                Code.CHUNK_MISMATCH, WEIGHTS_FILE,
                f"the file has {weights.size} bytes, the statement lists {len(chunks)} chunks of {CHUNK_BYTES}",
            )  # fmt: skip
        self._weights, self._chunks, self._dtype = weights, chunks, layout.dtype
        self._placings = placings(manifest, layout, image)
        self._begins = [placing.tensor.begin for placing in self._placings]
        self._edges: dict[int, tuple[bytes, bytes]] = {}

    def take_chunk(self, index: int) -> None:
        """Read and check a chunk, then place all values that lie inside it. For any thread, in any order."""
        begin = index * CHUNK_BYTES
        data = self._weights.read_at(begin, min(CHUNK_BYTES, self._weights.size - begin))
        if hashlib.sha256(data).hexdigest() != self._chunks[index]:
            raise error(
                Code.CHUNK_MISMATCH, f"{WEIGHTS_FILE}[{begin}:{begin + len(data)}]",
                f"chunk {index} is not the one that was admitted",
                "Remove the version from the local store; it is fetched and verified again on the next load.",
            )  # fmt: skip
        self._edges[index] = data[:_LONGEST_ITEM], data[-_LONGEST_ITEM:]
        for placing in self._touched(begin, begin + len(data)):
            self._place_part(placing, data, begin)

    def finish(self) -> None:
        """Place the values that lie across the border of two chunks: a tensor may begin at any byte."""
        for placing in self._placings:
            tensor, item = placing.tensor, ITEM_BYTES[placing.tensor.dtype]
            for index in range(tensor.begin // CHUNK_BYTES + 1, (tensor.end - 1) // CHUNK_BYTES + 1):
                before = (index * CHUNK_BYTES - tensor.begin) % item
                if before:
                    value = self._edges[index - 1][1][-before:] + self._edges[index][0][: item - before]
                    first = (index * CHUNK_BYTES - tensor.begin) // item
                    placing.put(first, self._values(tensor, value, 0, 1))

    def _touched(self, begin: int, end: int) -> list[Placing]:
        """Those whose tensors have bytes in [begin, end)."""
        last = bisect_left(self._begins, end)
        first = max(bisect_right(self._begins, begin) - 1, 0)
        return [p for p in self._placings[first:last] if p.tensor.end > begin]

    def _place_part(self, placing: Placing, data: bytes, begin: int) -> None:
        """What lies whole in `data`, which are the file's bytes from `begin` on."""
        tensor, item = placing.tensor, ITEM_BYTES[placing.tensor.dtype]
        first = -(-max(begin - tensor.begin, 0) // item)
        last = (min(begin + len(data), tensor.end) - tensor.begin) // item
        if first < last:
            placing.put(first, self._values(tensor, data, tensor.begin + first * item - begin, last - first))

    def _values(self, tensor: TensorEntry, data: bytes, offset: int, count: int) -> NDArray[Any]:
        """`count` values as the layout's dtype, rounded to nearest even where that is narrower; bits, not numbers."""
        bits = np.dtype(f"u{ITEM_BYTES[self._dtype]}")
        if tensor.dtype == self._dtype:
            return np.frombuffer(data, bits, count, offset)
        values = np.frombuffer(data, NUMPY_DTYPE[tensor.dtype], count, offset)
        with np.errstate(over="ignore"):
            cast = values.astype(NUMPY_DTYPE[self._dtype])
        if not np.isfinite(cast).all():
            raise error(
                Code.NONFINITE, tensor.name, f"a value of this {tensor.dtype} tensor does not fit {self._dtype}",
                "Run the cache with dtype F32 or BF16 for this adapter.",
            )  # fmt: skip
        return cast.view(bits)
