"""Where each rank block of an adapter goes: the pages of its packed form (ARCHITECTURE, Pages).

A page belongs to one adapter, and a block lies inside one page, so any free pages serve and nothing
fragments (I15). A is cut along the rank as it stands in the file, [rank, in]; B is stored transposed,
[rank, out], so that any rank reads whole lines. Row counts are true: nothing is padded to a maximum.

Pure arithmetic on a manifest: the same manifest, dtype and page size give the same layout everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from adapterd.loader.errors import Code, error
from adapterd.loader.manifest import Manifest, ModuleEntry

PAGE_BYTES = 1 << 20
ALIGNMENT = 256
"""Blocks start at multiples of this many bytes: whole 128-byte lines, and room for 16-byte offset units."""
BLOCK_ROWS = (16, 8, 4, 2, 1)
"""Candidate rows of a block, best first: 16 is the kernels' rank tile."""

Dtype = Literal["F32", "F16", "BF16"]
ITEM_BYTES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}

Matrix = Literal["a", "b"]


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


@dataclass(frozen=True, slots=True)
class Layout:
    """The packed form of one version: `n_pages` pages of `page_bytes`, elements of `dtype`.

    `blocks` is ordered by module, then A before B, then rank row.
    """

    page_bytes: int
    dtype: Dtype
    n_pages: int
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed form."""
        return self.n_pages * self.page_bytes


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
    unplaced = list(_cut(manifest, dtype, page_bytes))
    item = ITEM_BYTES[dtype]
    sizes = [_aligned(rows * width * item) for _, _, _, rows, width in unplaced]
    places, n_pages = _first_fit(sizes, page_bytes)
    blocks = tuple(
        Block(module, matrix, row, rows, width, page, offset)
        for (module, matrix, row, rows, width), (page, offset) in zip(unplaced, places, strict=True)
    )
    return Layout(page_bytes, dtype, n_pages, blocks)


def _cut(manifest: Manifest, dtype: Dtype, page_bytes: int) -> Iterator[tuple[int, Matrix, int, int, int]]:
    """(module, matrix, first row, rows, width) of every block, in the order of `Layout.blocks`."""
    for index, module in enumerate(manifest.modules):
        step = block_rows(module, dtype, page_bytes)
        sides: tuple[tuple[Matrix, int], ...] = (("a", module.in_features), ("b", module.out_features))
        for matrix, width in sides:
            for row in range(0, module.rank, step):
                yield index, matrix, row, min(step, module.rank - row), width


def _first_fit(sizes: list[int], page_bytes: int) -> tuple[list[tuple[int, int]], int]:
    """(page, offset) of each size, largest first, and the number of pages."""
    places = [(0, 0)] * len(sizes)
    pages = _OpenPages(len(sizes), page_bytes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        places[index] = pages.take(sizes[index])
    return places, max((page + 1 for page, _ in places), default=0)


class _OpenPages:
    """Pages that fill up; `take` finds the first with room in logarithmic time.

    A stranger chooses the shapes, and looking at every page for every block took minutes for the worst of
    them. Each node of this binary tree knows the most room that a page below it has; the leaves are the pages.
    """

    def __init__(self, most: int, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._leaves = 1 << max(most - 1, 0).bit_length()
        self._room = [page_bytes] * (2 * self._leaves)

    def take(self, nbytes: int) -> tuple[int, int]:
        """(page, offset) of `nbytes` that are now used."""
        room, node = self._room, 1
        while node < self._leaves:
            node *= 2
            node += room[node] < nbytes
        page, offset = node - self._leaves, self._page_bytes - room[node]
        room[node] -= nbytes
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
        return page, offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
