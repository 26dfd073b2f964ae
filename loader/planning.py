"""Where the rank blocks of an adapter go: block sizes, and first fit into pages.

Pure arithmetic on a manifest: the same manifest, dtype, page size and sharding give the same layout everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from adapterd.loader.errors import Code, error
from adapterd.loader.layout import ALIGNMENT, CUT_COLUMNS, ITEM_BYTES, PAGE_BYTES, Dtype, Layout
from adapterd.loader.manifest import Manifest, ModuleEntry
from adapterd.loader.sharding import WHOLE, Cut, Ranges, Sharding

BLOCK_ROWS = (16, 8, 4, 2, 1)
"""Candidate rows of a block, best first: 16 is the kernels' rank tile."""


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
