"""Where each rank block of an adapter goes: the pages of its packed form (ARCHITECTURE, Pages).

A page belongs to one adapter, and a block lies inside one page, so any free pages serve and nothing
fragments (I15). A is cut along the rank as it stands in the file, [rank, in]; B is stored transposed,
[rank, out], so that any rank reads whole lines. Row counts are true: nothing is padded to a maximum.

Under tensor parallelism a rank packs only its part of a matrix: the layout says which columns of A and which
rows of B these are (`cuts`), so that the packed forms of two ranks are never taken for one another.

Pure arithmetic on a manifest: the same manifest, dtype, page size and sharding give the same layout everywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from adapterd.loader.errors import Code, error
from adapterd.loader.identity import sha256_hex
from adapterd.loader.manifest import Manifest, ModuleEntry
from adapterd.loader.sharding import WHOLE, Cut, Ranges, Sharding

PAGE_BYTES = 1 << 20
ALIGNMENT = 256
"""Blocks start at multiples of this many bytes: whole 128-byte lines, and room for 16-byte offset units."""
BLOCK_ROWS = (16, 8, 4, 2, 1)
"""Candidate rows of a block, best first: 16 is the kernels' rank tile."""

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


class Widths(Protocol):
    """A linear as this rank holds it."""

    @property
    def name(self) -> str: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Held:
    """One adapted module as this rank holds it."""

    name: str
    rank: int
    in_features: int
    out_features: int
    cut: Cut


def block_rows(module: Widths, dtype: Dtype, page_bytes: int = PAGE_BYTES) -> int:
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


def plan_layout(manifest: Manifest, dtype: Dtype, page_bytes: int = PAGE_BYTES, sharding: Sharding = WHOLE) -> Layout:
    """Place every block that this rank holds: largest first into the first page with room.

    Raises:
        Refused: QUOTA_EXCEEDED as `block_rows`. Failed: SETTINGS_INVALID as `Sharding.cut`.
    """
    held = _held(manifest, sharding)
    rows = _cut(held, dtype, page_bytes)
    sizes = rows[:, 3] * rows[:, 4] * ITEM_BYTES[dtype]
    places, n_pages = _first_fit(-(-sizes // ALIGNMENT) * ALIGNMENT, page_bytes)
    table = np.concatenate([rows, places], axis=1).astype(np.int32)
    cuts = np.array(list(_cuts(manifest, held)), np.int32).reshape(-1, len(CUT_COLUMNS))
    return Layout.of_table(page_bytes, dtype, n_pages, table, cuts)


def _held(manifest: Manifest, sharding: Sharding) -> Sequence[_Held | ModuleEntry]:
    """Without a rule, the modules as they are."""
    if not sharding.rules:
        return manifest.modules
    found = []
    for module in manifest.modules:
        cut = sharding.cut(module.name, module.in_features, module.out_features)
        found.append(_Held(module.name, module.rank, cut.in_features, cut.out_features, cut))
    return found


def _cut(held: Sequence[_Held | ModuleEntry], dtype: Dtype, page_bytes: int) -> NDArray[np.int64]:
    """[blocks, 5]: module, matrix, first row, rows and width of every block, in the order of `Layout.blocks`."""
    steps = np.array([block_rows(module, dtype, page_bytes) for module in held], np.int64)
    ranks = np.array([module.rank for module in held], np.int64)
    widths = np.array([width for m in held for width in (m.in_features, m.out_features)], np.int64)
    blocks = np.repeat(-(-ranks // steps), 2)  # of each matrix
    of = np.repeat(np.arange(len(blocks)), blocks)  # which matrix a block is of
    module = of // 2
    row = (np.arange(len(of)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * steps[module]
    return np.stack([module, of % 2, row, np.minimum(steps[module], ranks[module] - row), widths[of]], axis=1)


def _cuts(manifest: Manifest, held: Sequence[_Held | ModuleEntry]) -> Iterator[tuple[int, int, int, int]]:
    """`CUT_COLUMNS` of what is not whole."""
    for index, (module, mine) in enumerate(zip(manifest.modules, held, strict=True)):
        if not isinstance(mine, _Held):
            continue
        sides: tuple[tuple[int, Ranges], ...] = (
            (module.in_features, mine.cut.inputs),
            (module.out_features, mine.cut.outputs),
        )
        for matrix, (features, ranges) in enumerate(sides):
            if ranges != ((0, features),):
                yield from ((index, matrix, begin, end) for begin, end in ranges)


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
