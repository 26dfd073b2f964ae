"""Memory for one packed form: a single stretch, or pages from anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adapterd.loader.layout import Layout

Memory = memoryview | Sequence[memoryview]
"""`layout.nbytes` bytes in a row, or the layout's pages one by one."""


CHUNK_BYTES = 2 << 20
"""Of the packed form; not the admission statement's. A large adapter has many, so that threads end together; smaller
ones would have them meet more often, which costs as much as the check of a MiB."""


class PackedImage:
    """The bytes of a packed form, numbered as if they lay in a row. Holds no bytes itself."""

    def __init__(self, layout: Layout, memory: Memory) -> None:
        """Raises ValueError unless `memory` has the layout's size."""
        self._size = layout.nbytes if isinstance(memory, memoryview) else layout.page_bytes
        self._pieces = [memory.cast("B")] if isinstance(memory, memoryview) else [page.cast("B") for page in memory]
        self.nbytes = sum(map(len, self._pieces))
        if self.nbytes != layout.nbytes or any(len(piece) != self._size for piece in self._pieces):
            raise ValueError(f"the memory has {self.nbytes} bytes, the layout needs {layout.nbytes}")

    def parts(self, begin: int, end: int) -> list[memoryview]:
        """Bytes [begin, end), in order; none of them twice. A part lies inside one piece of memory."""
        found = []
        while begin < end:
            index, offset = divmod(begin, self._size)
            part = self._pieces[index][offset : offset + end - begin]
            found.append(part)
            begin += len(part)
        return found

    def within(self, spans: NDArray[np.int64]) -> list[memoryview]:
        """As `parts` of each [begin, end) of `spans`, all of which lie inside a page."""
        index, begin = np.divmod(spans[:, 0], self._size)
        end = spans[:, 1] - index * self._size
        pieces, of = self._pieces, zip(index.tolist(), begin.tolist(), end.tolist(), strict=True)
        return [pieces[i][b:e] for i, b, e in of]

    @property
    def n_chunks(self) -> int:
        """Of `CHUNK_BYTES`; the last may be shorter."""
        return -(-self.nbytes // CHUNK_BYTES)

    def chunk(self, index: int) -> list[memoryview]:
        """The bytes of one chunk."""
        return self.parts(index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.nbytes))
