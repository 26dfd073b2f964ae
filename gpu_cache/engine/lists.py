"""A step's lists, made in numpy: what is to be done, the smallest shape that holds it, and the plan in a buffer.

The work of a step is known by the shares of its entries. Everything here is a few calls of numpy over all of them,
whatever is in the batch; `device_plan` says what stands in the lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from adapterd.gpu_cache.engine.device_plan import LaunchShape, Regime, list_length
from adapterd.gpu_cache.engine.kernels.configs import tile_rows
from adapterd.gpu_cache.engine.shares import ENTRY, FIRST_SLOT, Ints, StepShares
from adapterd.gpu_cache.table_shape import MOST_ROWS

SOME_ROWS = 256
"""Up to this many, rows are worked on one by one, or where they share adapters as `regime_of` says of each linear."""
MOST_EIGHTHS = 6
"""Of the rows, that tiles beside rows may be."""
ROOM_FOR_ALL = 64
"""Rows up to which an empty tile for each costs less than graphs that do not fit."""
_COUNT = np.arange(MOST_ROWS, dtype=np.int32)


class Work:
    """The entries of a step, by their shares.

    Args:
        shares: of each entry of the step.
        lengths: rows of each.
        rows: of the step.
        table: entry of each share.
        mixed: cells and weights of the compositions among them, as the table places them (`Shares.mixed`).
    """

    def __init__(self, shares: StepShares, lengths: tuple[int, ...], rows: int, table: Ints, mixed: Ints) -> None:
        self.rows, self.mixed, self.parts = rows, mixed, mixed.shape[1]
        self.shares, self.table = shares, table
        self.lengths = None if len(lengths) == rows else np.array(lengths, np.int32)
        blocks = table[:, 3].take(shares.array)
        self.most_blocks = int(blocks[blocks.argmax()]) or 1  # half the time of `max`
        self.ends: Ints | None = None  # of the blocks of each row, where an entry is one
        if self.lengths is None:
            self.ends = _ends(blocks)
            self.items = int(self.ends[-1])
        else:
            self.items = int(blocks @ self.lengths)
        self.list_items = max(self.items, self.parts)
        self._gathered: Gathered | None = None

    @property
    def adapted_rows(self) -> int:
        """Rows that kernels serve."""
        if self.lengths is None:
            return self.rows - self.shares.unserved
        return int((self.shares.array >= FIRST_SLOT) @ self.lengths)

    @property
    def gathered(self) -> Gathered:
        """Made once, where tiles are asked for."""
        if self._gathered is None:
            self._gathered = Gathered(self)
        return self._gathered

    def tile_count(self, tile_rows: int) -> int:
        return self.gathered.tiles(tile_rows)[2]


class Gathered:
    """The rows of each composition together, in some order of all rows.

    Attributes:
        rows: of all of them.
        begins, sizes: of each composition in the order.
    """

    def __init__(self, work: Work) -> None:
        array, lengths = work.shares.array, work.lengths
        by = array.argsort(kind="stable")
        by = by[work.shares.unserved :]  # the base's and the reference's are first
        shares = array.take(by)
        new = np.empty(len(by) + 1, np.bool_)
        new[0] = new[-1] = True
        np.not_equal(shares[1:], shares[:-1], out=new[1:-1])
        bounds = new.nonzero()[0].astype(np.int32)
        self._by, self._shares, self._table = by, shares.take(bounds[:-1]), work.table
        self._runs: tuple[Ints, Ints] | None = None  # of an entry each: first row less place in the order, and rows
        if lengths is not None:
            behind = np.zeros(len(by) + 1, np.int32)
            lengths.take(by).cumsum(out=behind[1:])
            first = lengths.cumsum(dtype=np.int32).take(by) - behind[1:]
            self._runs, bounds = (first, lengths.take(by)), behind.take(bounds)
        self.rows, self.begins = int(bounds[-1]), bounds[:-1]
        self.sizes = bounds[1:] - self.begins
        self._tiles: dict[int, tuple[Ints, Ints, int]] = {}

    def tiles(self, tile_rows: int) -> tuple[Ints, Ints, int]:
        """How many of so many rows each composition has, where they end in a list of them, and how long that is."""
        known = self._tiles.get(tile_rows)
        if known is None:
            count = (self.sizes + (tile_rows - 1)) // tile_rows
            ends = _ends(count)
            known = self._tiles[tile_rows] = count, ends, int(ends[-1]) if len(ends) else 0
        return known

    def fill_order(self, order: Ints) -> None:
        """Rows, those of a composition together, each in the order of the step."""
        if self._runs is None:
            order[:] = self._by
        else:
            first, rows = self._runs
            np.add(first.repeat(rows), _count(self.rows), out=order)

    def fill_tiles(self, tile_rows: int, tiles: Ints) -> None:
        """Entries of tiles, as many as there are."""
        count, ends, total = self.tiles(tile_rows)
        shares = self._shares
        if total == len(shares):  # one each
            self._table.take(shares, axis=0, out=tiles, mode="clip")
            tiles[:, 0], tiles[:, 1] = self.begins, self.sizes
            return
        of = _count(len(shares)).repeat(count)
        self._table.take(shares.take(of), axis=0, out=tiles, mode="clip")
        first = self.begins - (ends - count) * tile_rows
        at = np.add(first.take(of), _count(total) * tile_rows, out=tiles[:, 0])
        np.minimum((self.begins + self.sizes).take(of) - at, tile_rows, out=tiles[:, 1])


# --- shapes


def shape_of(work: Work, want_tiles: Callable[[LaunchShape, int], bool], *, batch_invariant: bool) -> LaunchShape:
    """The smallest shape that holds the step: in the regime of rows if they are few, and with tiles if they share.

    Args:
        want_tiles: whether any linear would, asked with the shape in the regime of rows and the number of groups.
    """
    if batch_invariant or work.rows > SOME_ROWS:
        return natural_shape(work, Regime.TILES, tile_rows(work.rows))
    shape = natural_shape(work, Regime.ROWS, 1)
    sharing = work.adapted_rows - work.shares.groups
    if 4 * sharing < work.rows or not want_tiles(shape, work.rows - sharing):
        return shape
    return with_tiles(shape, work, tile_rows(work.rows))


def natural_shape(work: Work, regime: Regime, tile_rows: int) -> LaunchShape:
    """The smallest shape that holds `work` in one regime."""
    blocks = 1 << (work.most_blocks - 1).bit_length()
    if regime is Regime.ROWS:
        return _shape(regime, work.rows, 1, work.rows, list_length(work.list_items, work.rows), blocks)
    tiles = list_length(work.tile_count(tile_rows), -(-work.rows // tile_rows))
    return _shape(regime, work.rows, tile_rows, tiles, list_length(work.parts, 16), blocks)


def tile_groups(rows: int) -> list[int]:
    """What `LaunchShape.groups` may be in a step of so many rows: see `with_tiles`."""
    return [eighths * -(-rows // 8) for eighths in range(MOST_EIGHTHS + 1)] if rows <= SOME_ROWS else [0]


def with_tiles(shape: LaunchShape, work: Work, tile_rows: int) -> LaunchShape:
    """`shape`, of the regime of rows, with the tiles of the same rows beside it.

    How many are reckoned with goes by eighths of the rows. From seven on they are left out: no linear would want
    them. Up to `ROOM_FOR_ALL` rows the list has room for a tile a row, so that a graph of this shape is right for
    any plan of so many rows and blocks, however they share.
    """
    rows, eighth = work.rows, -(-work.rows // 8)
    eighths = -(-work.tile_count(tile_rows) // eighth)
    if eighths > MOST_EIGHTHS:
        return shape
    groups = eighths * eighth
    tiled = _shape(Regime.TILES, rows, tile_rows, rows if rows <= ROOM_FOR_ALL else groups, 0, shape.blocks, groups)
    return _both(shape, tiled)


@lru_cache(4096)
def _shape(
    regime: Regime, rows: int, tile_rows: int, tiles: int, items: int, blocks: int, groups: int = 0
) -> LaunchShape:
    return LaunchShape(regime, rows, tile_rows, tiles, items, blocks, None, groups)


@lru_cache(4096)
def _both(shape: LaunchShape, tiled: LaunchShape) -> LaunchShape:
    return replace(shape, together=tiled)


def fits(work: Work, shape: LaunchShape) -> bool:
    if work.rows != shape.rows or work.most_blocks > shape.blocks:
        return False
    if (work.list_items if shape.regime is Regime.ROWS else work.parts) > shape.items:
        return False
    tiled = shape.tiled
    return tiled is None or work.tile_count(tiled.tile_rows) <= tiled.tiles


# --- the plan


def fill(shape: LaunchShape, work: Work, buffer: Ints) -> int:
    """Write the plan into `buffer`, int32; how much of it is to be sent. `work` fits `shape`."""
    at, tiled, entries = shape.places, shape.tiled, buffer.reshape(-1, ENTRY)
    if shape.regime is Regime.ROWS:
        first = at.items // ENTRY
        _fill_rows(work, entries[: shape.rows], entries[first : first + shape.items])
    if tiled is not None:
        first = at.tiles // ENTRY
        order = buffer[at.order : at.order + shape.rows]
        _fill_tiles(work.gathered, entries[first : first + tiled.tiles], order, tiled.tile_rows)
    if not work.parts:
        return at.parts
    buffer[at.parts : at.parts + work.parts], buffer[at.weights : at.weights + work.parts] = work.mixed
    return at.end


def _fill_rows(work: Work, tiles: Ints, items: Ints) -> None:
    shares = work.shares.array if work.lengths is None else work.shares.array.repeat(work.lengths)
    work.table.take(shares, axis=0, out=tiles, mode="clip")
    tiles[:, 0] = _count(len(tiles))
    blocks, count = tiles[:, 3], work.items
    rows = _count(len(tiles)).repeat(blocks)
    found = items[:count]
    tiles.take(rows, axis=0, out=found, mode="clip")
    numbers = blocks * 65537  # blocks << 16 | blocks, from which the end of the row is taken
    numbers -= _ends(blocks) if work.ends is None else work.ends
    np.add(numbers.take(rows), _count(count), out=found[:, 3])
    items[count:, 1] = 0


def _fill_tiles(gathered: Gathered, tiles: Ints, order: Ints, tile_rows: int) -> None:
    rows, total = gathered.rows, gathered.tiles(tile_rows)[2]
    gathered.fill_order(order[:rows])
    if rows < len(order):
        order[rows:] = 0
    gathered.fill_tiles(tile_rows, tiles[:total])
    tiles[total:, 1] = 0


def _ends(sizes: Ints) -> Ints:
    """Running sums."""
    return np.add.accumulate(sizes, out=np.empty(len(sizes), np.int32))


def _count(size: int) -> Ints:
    """0, 1, 2, …"""
    return _COUNT[:size] if size <= len(_COUNT) else np.arange(size, dtype=np.int32)
