"""From a verified file to the engine's layout, checking each chunk on the very bytes that are packed.

The chunk list stands in the admission statement, so a byte that changed on disk after the download is
found here, before it can reach VRAM (I1). Chunks are independent of each other: a few threads read, hash
and place them beside each other. Peak memory: two chunks a thread.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from threading import Event, local
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.files import FileReader, read_parts
from adapterd.loader.identity import WEIGHTS_FILE
from adapterd.loader.image import Memory, PackedImage
from adapterd.loader.layout import ITEM_BYTES, Layout
from adapterd.loader.manifest import Manifest, TensorEntry
from adapterd.loader.parallel import Helpers, default_threads, for_each
from adapterd.loader.placing import MOST_TURNED, Placing, placings
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
    helpers: Helpers | None = None,
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
        helpers: where they come from but for the caller's own; None: started for this.

    Raises:
        Untrusted: CHUNK_MISMATCH naming the chunk; `out` is then garbage and must not be used.
        Refused: NONFINITE if a finite value does not fit the layout's dtype.
    """
    packing = _Packing(manifest, layout, weights, chunks, PackedImage(layout, out))
    for_each(packing.n_tasks, packing.work, threads or default_threads(), helpers)
    packing.finish()


class _Packing:
    """One call of `pack`: a task for every chunk, then one for every B that landed in its blocks.

    So the threads that find no chunk any more, while the last ones are hashed, transpose what has come before.
    """

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
        self._to_turn = [placing for placing in self._placings if placing.lands and placing.is_b]
        self._edges: dict[int, tuple[bytes, bytes]] = {}
        self._ended = [Event() for _ in chunks]
        self._own = local()

    @property
    def n_tasks(self) -> int:
        return len(self._chunks) + len(self._to_turn)

    def work(self, index: int) -> None:
        """One task. For any thread; begun in order, which is what `_turn` relies on."""
        if index >= len(self._chunks):
            self._turn(self._to_turn[index - len(self._chunks)])
            return
        try:
            self._take_chunk(index)
        finally:
            self._ended[index].set()

    def finish(self) -> None:
        """Place the values that lie across the border of two chunks: a tensor may begin at any byte."""
        for placing in self._placings:
            tensor, item = placing.tensor, ITEM_BYTES[placing.tensor.dtype]
            if placing.lands:
                continue
            for index in range(tensor.begin // CHUNK_BYTES + 1, (tensor.end - 1) // CHUNK_BYTES + 1):
                before = (index * CHUNK_BYTES - tensor.begin) % item
                if before:
                    value = self._edges[index - 1][1][-before:] + self._edges[index][0][: item - before]
                    first = (index * CHUNK_BYTES - tensor.begin) // item
                    placing.put(first, self._values(tensor, value, 0, 1))

    def _take_chunk(self, index: int) -> None:
        """Read a chunk, what lands into its blocks and the rest beside, and check the bytes where they then lie."""
        begin = index * CHUNK_BYTES
        end = min(begin + CHUNK_BYTES, self._weights.size)
        touched, beside = self._touched(begin, end), self._spare()[: end - begin]
        parts = list(_parts(touched, begin, beside))
        read_parts(self._weights, begin, parts)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        if digest.hexdigest() != self._chunks[index]:
            raise error(
                Code.CHUNK_MISMATCH, f"{WEIGHTS_FILE}[{begin}:{end}]",
                f"chunk {index} is not the one that was admitted",
                "Remove the version from the local store; it is fetched and verified again on the next load.",
            )  # fmt: skip
        self._edges[index] = bytes(beside[:_LONGEST_ITEM]), bytes(beside[-_LONGEST_ITEM:])
        for placing in touched:
            if not placing.lands:
                self._place_part(placing, beside, begin)

    def _turn(self, placing: Placing) -> None:
        """Not before all its bytes have come. Their chunks were begun before, so this wait ends; where one did not
        hold, whoever took it says so, and all of the image is garbage."""
        tensor = placing.tensor
        for index in range(tensor.begin // CHUNK_BYTES, (tensor.end - 1) // CHUNK_BYTES + 1):
            self._ended[index].wait()
        placing.turn(self._spare())

    def _spare(self) -> memoryview:
        """This thread's own memory; the kernel gives only what is touched."""
        try:
            return cast(memoryview, self._own.memory)
        except AttributeError:
            self._own.memory = np.empty(2 * max(CHUNK_BYTES, MOST_TURNED), np.uint8).data
            return cast(memoryview, self._own.memory)

    def _touched(self, begin: int, end: int) -> list[Placing]:
        """Those whose tensors have bytes in [begin, end)."""
        last = bisect_left(self._begins, end)
        first = max(bisect_right(self._begins, begin) - 1, 0)
        return [p for p in self._placings[first:last] if p.tensor.end > begin]

    def _place_part(self, placing: Placing, data: memoryview, begin: int) -> None:
        """What lies whole in `data`, which are the file's bytes from `begin` on."""
        tensor, item = placing.tensor, ITEM_BYTES[placing.tensor.dtype]
        first = -(-max(begin - tensor.begin, 0) // item)
        last = (min(begin + len(data), tensor.end) - tensor.begin) // item
        if first < last:
            placing.put(first, self._values(tensor, data, tensor.begin + first * item - begin, last - first))

    def _values(self, tensor: TensorEntry, data: bytes | memoryview, offset: int, count: int) -> NDArray[Any]:
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


def _parts(touched: Sequence[Placing], begin: int, beside: memoryview) -> Iterator[memoryview]:
    """Where the file's bytes from `begin` on go, as many as `beside` has: to each its place in there, if no other."""
    end, done = begin + len(beside), begin
    for placing in touched:
        tensor = placing.tensor
        if placing.lands:
            first, last = max(tensor.begin, begin), min(tensor.end, end)
            if done < first:
                yield beside[done - begin : first - begin]
            yield from placing.landing(first - tensor.begin, last - tensor.begin)
            done = last
    if done < end:
        yield beside[done - begin :]
