"""Where each rank block of an adapter lies: the pages of its packed form (ARCHITECTURE, Pages).

A page belongs to one adapter, and a block lies inside one page, so any free pages serve and nothing
fragments (I15). A is cut along the rank as it stands in the file, [rank, in]; B is stored transposed,
[rank, out], so that any rank reads whole lines. Row counts are true: nothing is padded to a maximum.

Under tensor parallelism a rank packs only its part of a matrix: the layout says which columns of A and which
rows of B these are (`cuts`), so that the packed forms of two ranks are never taken for one another.
`planning` says where blocks go.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from adapterd.loader.identity import sha256_hex

PAGE_BYTES = 1 << 20
ALIGNMENT = 256
"""Blocks start at multiples of this many bytes: whole 128-byte lines, and room for 16-byte offset units."""

Dtype = Literal["F32", "F16", "BF16"]
ITEM_BYTES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}

Matrix = Literal["a", "b"]

COLUMNS = ("module", "matrix", "row", "rows", "width", "page", "offset")
CUT_COLUMNS = ("module", "matrix", "begin", "end")
_MATRICES: tuple[Matrix, ...] = ("a", "b")
_DTYPES: tuple[Dtype, ...] = ("F32", "F16", "BF16")
_CELL = np.dtype("<i4")
_MOST = 2**31 - 1
_MAGIC = b"ADL2"
_HEADER = struct.Struct("<4s5I")  # magic, page_bytes, dtype, n_pages, blocks, cuts


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` consecutive rank rows of one matrix of one module, row-major, inside one page.

    Attributes:
        module: index in `manifest.modules`.
        matrix: "a" is A [rank, in]; "b" is Bᵀ [rank, out].
        row: first rank row.
        rows: how many.
        width: in_features or out_features, in elements; of a sharded matrix, those that this rank holds.
        page: index of the page in the packed form.
        offset: bytes from the page's start; a multiple of `ALIGNMENT`.
    """

    module: int
    matrix: Matrix
    row: int
    rows: int
    width: int
    page: int
    offset: int


class Layout:
    """The packed form of one version: `n_pages` pages of `page_bytes`, elements of `dtype`. Immutable.

    Its blocks stand in one table of numbers, so that a layout crosses a socket as it lies in memory; `blocks`
    are objects for those who want them. Law: `Layout.from_bytes(x.to_bytes()) == x`.
    """

    __slots__ = ("_blocks", "_cells", "_cuts", "dtype", "n_pages", "page_bytes")

    def __init__(self, page_bytes: int, dtype: Dtype, n_pages: int, blocks: Iterable[Block] = ()) -> None:
        """Args: blocks: ordered by module, then A before B, then rank row."""
        self.page_bytes, self.dtype, self.n_pages = page_bytes, dtype, n_pages
        self._blocks: tuple[Block, ...] | None = tuple(blocks)
        rows = [(b.module, _MATRICES.index(b.matrix), b.row, b.rows, b.width, b.page, b.offset) for b in self._blocks]
        self._cells = np.array(rows, _CELL).reshape(-1, len(COLUMNS)).tobytes()
        self._cuts = b""

    @classmethod
    def of_table(
        cls,
        page_bytes: int,
        dtype: Dtype,
        n_pages: int,
        table: NDArray[np.int32],
        cuts: NDArray[np.int32] | None = None,
    ) -> Self:
        """From a table [blocks, 7] as `table` gives it, and one [cuts, 4] as `cuts` does."""
        self = cls(page_bytes, dtype, n_pages)
        self._blocks, self._cells = None, table.astype(_CELL).tobytes()
        self._cuts = b"" if cuts is None else cuts.astype(_CELL).tobytes()
        return self

    @property
    def table(self) -> NDArray[np.int32]:
        """[blocks, 7], read-only: `COLUMNS` of every block, the matrix as 0 for A and 1 for B."""
        return np.frombuffer(self._cells, _CELL).reshape(-1, len(COLUMNS))

    @property
    def cuts(self) -> NDArray[np.int32]:
        """[cuts, 4], read-only: `CUT_COLUMNS` of every range of columns of an A, or rows of a B, that is packed.

        Ordered by module, matrix and begin. A matrix without any is packed whole.
        """
        return np.frombuffer(self._cuts, _CELL).reshape(-1, len(CUT_COLUMNS))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, ordered by module, then A before B, then rank row."""
        if self._blocks is None:
            rows = self.table.tolist()
            self._blocks = tuple(Block(m, _MATRICES[x], row, rows, w, p, o) for m, x, row, rows, w, p, o in rows)
        return self._blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the packed form."""
        return self.n_pages * self.page_bytes

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of `to_bytes()`: equal for equal layouts only."""
        return sha256_hex(self.to_bytes())

    def spans(self) -> NDArray[np.int64]:
        """[blocks, 2]: first byte in the packed form, and the one behind the last."""
        table = self.table.astype(np.int64)
        rows, width, page, offset = table[:, 3:].T
        begin = page * self.page_bytes + offset
        return np.stack([begin, begin + rows * width * ITEM_BYTES[self.dtype]], axis=1)

    # --- the wire

    def to_bytes(self) -> bytes:
        """The exact form for another process: a header, then table and cuts as little-endian int32."""
        counts = len(self.table), len(self.cuts)
        header = _HEADER.pack(_MAGIC, self.page_bytes, _DTYPES.index(self.dtype), self.n_pages, *counts)
        return header + self._cells + self._cuts

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What `to_bytes` wrote; its blocks lie inside their pages, aligned and apart, whoever wrote it.

        Raises:
            ValueError: it is no layout.
        """
        if len(data) < _HEADER.size:
            raise ValueError("a layout is longer")
        magic, page_bytes, word, n_pages, count, n_cuts = _HEADER.unpack_from(data)
        if magic != _MAGIC or word >= len(_DTYPES) or not 0 < page_bytes <= _MOST or n_pages > _MOST:
            raise ValueError("this is no layout")
        cells = count * len(COLUMNS)
        if len(data) != _HEADER.size + 4 * (cells + n_cuts * len(CUT_COLUMNS)):
            raise ValueError(f"a layout of {count} blocks and {n_cuts} cuts has another length than {len(data)} bytes")
        numbers = np.frombuffer(data, _CELL, offset=_HEADER.size)
        table, cuts = numbers[:cells].reshape(-1, len(COLUMNS)), numbers[cells:].reshape(-1, len(CUT_COLUMNS))
        self = cls.of_table(page_bytes, _DTYPES[word], n_pages, table, cuts)
        self._check()
        self._check_cuts()
        return self

    def _check(self) -> None:
        module, matrix, row, rows, width, page, offset = self.table.astype(np.int64).T
        room = (self.page_bytes - offset) // ITEM_BYTES[self.dtype]
        holds = (module >= 0) & (matrix >= 0) & (matrix < len(_MATRICES)) & (row >= 0) & (rows > 0) & (width > 0)
        holds &= (page >= 0) & (page < self.n_pages) & (offset >= 0) & (offset % ALIGNMENT == 0)
        holds &= rows * width <= room
        if not holds.all():
            raise ValueError(f"block {int(np.flatnonzero(~holds)[0])} of the layout is not inside a page")
        spans = self.spans()
        spans = spans[np.argsort(spans[:, 0], kind="stable")]
        if (spans[1:, 0] < spans[:-1, 1]).any():
            raise ValueError("two blocks of the layout overlap")

    def _check_cuts(self) -> None:
        """Ascending and apart, and together as wide as the blocks of their matrix."""
        module, matrix, begin, end = self.cuts.astype(np.int64).T
        of = 2 * module + matrix
        ascends = (of[1:] > of[:-1]) | ((of[1:] == of[:-1]) & (begin[1:] >= end[:-1]))
        if not (ascends.all() and ((begin >= 0) & (begin < end) & (module >= 0) & (matrix >> 1 == 0)).all()):
            raise ValueError("the cuts of the layout are in disorder")
        cut, first = np.unique(of, return_index=True)
        widths = dict(zip(cut.tolist(), np.add.reduceat(end - begin, first).tolist() if len(cut) else [], strict=True))
        blocks = self.table[:, [0, 1, 4]].astype(np.int64)
        missing = set(widths)
        for index, side, width in np.unique(blocks, axis=0).tolist():
            missing.discard(2 * index + side)
            if widths.get(2 * index + side, width) != width:
                raise ValueError(f"the cuts of module {index} of the layout are not as wide as its blocks")
        if missing:
            raise ValueError("a cut of the layout is of a matrix without blocks")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"Layout({self.dtype}, {self.n_pages} pages of {self.page_bytes} bytes, {len(self.table)} blocks)"

    @property
    def _identity(self) -> tuple[int, str, int, bytes, bytes]:
        return self.page_bytes, self.dtype, self.n_pages, self._cells, self._cuts
