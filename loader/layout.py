"""Where each rank block of an adapter goes: the pages of its packed form (ARCHITECTURE, Pages).

A page belongs to one adapter, and a block lies inside one page, so any free pages serve and nothing
fragments (I15). A is cut along the rank as it stands in the file, [rank, in]; B is stored transposed,
[rank, out], so that any rank reads whole lines. Row counts are true: nothing is padded to a maximum.

Pure arithmetic on a manifest: the same manifest, dtype and page size give the same layout everywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from adapterd.loader.errors import Code, error
from adapterd.loader.identity import sha256_hex
from adapterd.loader.manifest import Manifest, ModuleEntry

PAGE_BYTES = 1 << 20
ALIGNMENT = 256
"""Blocks start at multiples of this many bytes: whole 128-byte lines, and room for 16-byte offset units."""
BLOCK_ROWS = (16, 8, 4, 2, 1)
"""Candidate rows of a block, best first: 16 is the kernels' rank tile."""

Dtype = Literal["F32", "F16", "BF16"]
ITEM_BYTES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}

Matrix = Literal["a", "b"]

COLUMNS = ("module", "matrix", "row", "rows", "width", "page", "offset")
_MATRICES: tuple[Matrix, ...] = ("a", "b")
_DTYPES: tuple[Dtype, ...] = ("F32", "F16", "BF16")
_CELL = np.dtype("<i4")
_MOST = 2**31 - 1
_MAGIC = b"ADL1"
_HEADER = struct.Struct("<4s4I")  # magic, page_bytes, dtype, n_pages, blocks


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` consecutive rank rows of one matrix of one module, row-major, inside one page.

    Attributes:
        module: index in `manifest.modules`.
        matrix: "a" is A [rank, in]; "b" is Bᵀ [rank, out].
        row: first rank row.
        rows: how many.
        width: in_features or out_features, in elements.
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

    __slots__ = ("_blocks", "_cells", "dtype", "n_pages", "page_bytes")

    def __init__(self, page_bytes: int, dtype: Dtype, n_pages: int, blocks: Iterable[Block] = ()) -> None:
        """Args: blocks: ordered by module, then A before B, then rank row."""
        self.page_bytes, self.dtype, self.n_pages = page_bytes, dtype, n_pages
        self._blocks: tuple[Block, ...] | None = tuple(blocks)
        rows = [(b.module, _MATRICES.index(b.matrix), b.row, b.rows, b.width, b.page, b.offset) for b in self._blocks]
        self._cells = np.array(rows, _CELL).reshape(-1, len(COLUMNS)).tobytes()

    @classmethod
    def of_table(cls, page_bytes: int, dtype: Dtype, n_pages: int, table: NDArray[np.int32]) -> Self:
        """From a table [blocks, 7] as `table` gives it."""
        self = cls(page_bytes, dtype, n_pages)
        self._blocks, self._cells = None, table.astype(_CELL).tobytes()
        return self

    @property
    def table(self) -> NDArray[np.int32]:
        """[blocks, 7], read-only: `COLUMNS` of every block, the matrix as 0 for A and 1 for B."""
        return np.frombuffer(self._cells, _CELL).reshape(-1, len(COLUMNS))

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
        """The exact form for another process: a header, then the table as little-endian int32."""
        count = len(self._cells) // (4 * len(COLUMNS))
        return _HEADER.pack(_MAGIC, self.page_bytes, _DTYPES.index(self.dtype), self.n_pages, count) + self._cells

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What `to_bytes` wrote; its blocks lie inside their pages, aligned and apart, whoever wrote it.

        Raises:
            ValueError: it is no layout.
        """
        if len(data) < _HEADER.size:
            raise ValueError("a layout is longer")
        magic, page_bytes, word, n_pages, count = _HEADER.unpack_from(data)
        if magic != _MAGIC or word >= len(_DTYPES) or not 0 < page_bytes <= _MOST or n_pages > _MOST:
            raise ValueError("this is no layout")
        if len(data) != _HEADER.size + count * 4 * len(COLUMNS):
            raise ValueError(f"a layout of {count} blocks has another length than {len(data)} bytes")
        table = np.frombuffer(data, _CELL, offset=_HEADER.size).reshape(-1, len(COLUMNS))
        self = cls.of_table(page_bytes, _DTYPES[word], n_pages, table)
        self._check()
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"Layout({self.dtype}, {self.n_pages} pages of {self.page_bytes} bytes, {len(self.table)} blocks)"

    @property
    def _identity(self) -> tuple[int, str, int, bytes]:
        return self.page_bytes, self.dtype, self.n_pages, self._cells


def block_rows(module: ModuleEntry, dtype: Dtype, page_bytes: int = PAGE_BYTES) -> int:
    """Rows of a block of this linear: the most of `BLOCK_ROWS` whose widest block is at most half a page.

    Two blocks a page keep the overhead of first-fit small: docs/adr/0004-pages-of-rank-blocks.md.

    Raises:
        Refused: QUOTA_EXCEEDED if one row of the linear is wider than a page.
    """
    row_bytes = max(module.in_features, module.out_features) * ITEM_BYTES[dtype]
    if _aligned(row_bytes) > page_bytes:
        raise error(
            Code.QUOTA_EXCEEDED, module.name,
            f"one rank row takes {row_bytes} bytes as {dtype}, a page holds {page_bytes}",
            "Give the cache larger pages (page_bytes), or a dtype of two bytes.",
        )  # fmt: skip
    for rows in BLOCK_ROWS:
        if rows * row_bytes <= page_bytes // 2:
            return rows
    return 1


def plan_layout(manifest: Manifest, dtype: Dtype, page_bytes: int = PAGE_BYTES) -> Layout:
    """Place every block: largest first into the first page with room.

    Raises:
        Refused: QUOTA_EXCEEDED as `block_rows`.
    """
    cut = np.array(list(_cut(manifest, dtype, page_bytes)), np.int64).reshape(-1, 5)
    sizes = cut[:, 3] * cut[:, 4] * ITEM_BYTES[dtype]
    places, n_pages = _first_fit(-(-sizes // ALIGNMENT) * ALIGNMENT, page_bytes)
    return Layout.of_table(page_bytes, dtype, n_pages, np.concatenate([cut, places], axis=1).astype(np.int32))


def _cut(manifest: Manifest, dtype: Dtype, page_bytes: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(module, matrix, first row, rows, width) of every block, in the order of `Layout.blocks`."""
    for index, module in enumerate(manifest.modules):
        step = block_rows(module, dtype, page_bytes)
        for matrix, width in enumerate((module.in_features, module.out_features)):
            for row in range(0, module.rank, step):
                yield index, matrix, row, min(step, module.rank - row), width


def _first_fit(sizes: NDArray[np.int64], page_bytes: int) -> tuple[NDArray[np.int64], int]:
    """[blocks, 2]: page and offset of each size, placed largest first; and the number of pages."""
    places = np.zeros((len(sizes), 2), np.int64)
    order = np.argsort(-sizes, kind="stable")
    falling = -sizes[order]
    pages = _OpenPages(len(sizes), page_bytes)
    done = 0
    while done < len(order):
        size = -int(falling[done])
        alike = int(np.searchsorted(falling, -size, side="right"))
        for page, offset, count in pages.take(size, alike - done):
            here = order[done : done + count]
            places[here, 0], places[here, 1] = page, offset + size * np.arange(count)
            done += count
    return places, int(places[:, 0].max(initial=-1)) + 1


class _OpenPages:
    """Pages that fill up; `take` finds the first with room in logarithmic time.

    A stranger chooses the shapes, and looking at every page for every block took minutes for the worst of
    them. Each node of this binary tree knows the most room that a page below it has; the leaves are the pages.
    """

    def __init__(self, most: int, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._leaves = 1 << max(most - 1, 0).bit_length()
        self._room = [page_bytes] * (2 * self._leaves)

    def take(self, nbytes: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(page, offset, how many) of `count` pieces of `nbytes` each, which are now used.

        Of equal pieces the first page with room takes as many as it can, so it is looked for once.
        """
        while count:
            node = self._first_with(nbytes)
            fits = min(count, self._room[node] // nbytes)
            yield node - self._leaves, self._page_bytes - self._room[node], fits
            self._use(node, fits * nbytes)
            count -= fits

    def _first_with(self, nbytes: int) -> int:
        room, node = self._room, 1
        while node < self._leaves:
            node *= 2
            node += room[node] < nbytes
        return node

    def _use(self, node: int, nbytes: int) -> None:
        room = self._room
        room[node] -= nbytes
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
