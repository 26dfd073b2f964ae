"""One step's work as the kernels read it: lists of int32 entries, made in numpy, sent in one pinned copy.

    tiles [n, 8]   what `expand` does: first row (or first place in `order`), rows, first cell, blocks, start
    items [n, 8]   what `shrink` does in the regime of rows: the same, with blocks << 16 | block
    order [rows]   in the regime of tiles: row numbers, those of a composition together
    parts [n]      cells of the blocks of compositions, from `start`; where start is −1 they are first, first + 1, …
    weights [n]    fp32, beside `parts`

An entry of 0 rows is empty. Entries name cells of a slot and no address, so one plan serves all layers.

A `LaunchShape` fixes grids, list lengths and with them every address: a captured CUDA graph is right for any plan
of its shape (I22). Lists are longer than a step needs, by steps of 1, 1½, 2, 4, … times the rows, so that few
shapes cover many batches; an empty entry costs about a nanosecond.

Where rows share adapters, small linears want rows and large ones tiles. A plan of such a step carries the lists of
both regimes, and each linear has its own by the shape alone (`kernels.configs.regime_of`), so that graphs stay right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from adapterd.gpu_cache.engine.shares import ENTRY, FIRST_SLOT, NOBODY, REFERENCE, Ints
from adapterd.gpu_cache.table_shape import PLAN_ALIGN, plan_words

MOST_EIGHTHS = 6
"""Of the rows, that tiles beside rows may be."""
ROOM_FOR_ALL = 64
"""Rows up to which an empty tile for each costs less than graphs that do not fit."""


class Regime(StrEnum):
    """How rows are worked on; where it changes, a row's bits may (I18)."""

    ROWS = "rows"  # each by itself, without tensor cores
    TILES = "tiles"  # those of a composition together


@dataclass(frozen=True)
class LaunchShape:
    """All that grids and addresses depend on: the key of a captured graph.

    Attributes:
        rows: of the step.
        tile_rows: of a tile; 1 in the regime of rows.
        tiles, items: list lengths; `items` bounds `parts`, too.
        blocks: the most blocks of an entry, a power of two.
        together: in the regime of rows, the tiles of the same rows, for linears that want those; or none. It has
            the same rows and blocks, and no items.
        groups: of such tiles, how many `regime_of` reckons with.
    """

    regime: Regime
    rows: int
    tile_rows: int
    tiles: int
    items: int
    blocks: int
    together: LaunchShape | None = None
    groups: int = 0

    @property
    def tiled(self) -> LaunchShape | None:
        """The part of it that is in the regime of tiles."""
        return self if self.regime is Regime.TILES else self.together

    @property
    def regimes(self) -> str:
        return self.regime if self.together is None else f"{self.regime}+{self.together.regime}"

    @cached_property
    def places(self) -> Places:
        """Where each list begins, in int32s."""
        alone, tiled = self.regime is Regime.ROWS, self.tiled
        ends = [0]
        for size in (
            self.rows * ENTRY if alone else 0, self.items * ENTRY if alone else 0,
            tiled.tiles * ENTRY if tiled else 0, self.rows if tiled else 0, self.items, self.items,
        ):  # fmt: skip
            ends.append(ends[-1] + -(-size // PLAN_ALIGN) * PLAN_ALIGN)
        return Places(*ends)


@dataclass(frozen=True, slots=True)
class Places:
    """Of `LaunchShape.places`; `end` is behind the last."""

    by_row: int
    items: int
    tiles: int
    order: int
    parts: int
    weights: int
    end: int


class Work:
    """The entries of a step, by their shares.

    Args:
        shares: of each entry of the step.
        lengths: rows of each.
        rows: of the step.
        table: entry of each share.
        mixed: cells and weights of the compositions among them, as the table places them (`Shares.mixed`).
    """

    def __init__(self, shares: Sequence[int], lengths: tuple[int, ...], rows: int, table: Ints, mixed: Ints) -> None:
        self.rows, self.mixed, self.parts = rows, mixed, int(mixed.shape[1])
        self.shares = np.array(shares, np.intp)
        self.lengths = None if len(shares) == rows else np.array(lengths, np.int32)
        self.entries = table.take(self.shares, axis=0)
        self.groups = len({*shares} - {NOBODY, REFERENCE})
        blocks = self.entries[:, 3]
        self.most_blocks = max(int(np.maximum.reduce(blocks)), 1)
        self.items = int(np.add.reduce(blocks) if self.lengths is None else blocks @ self.lengths)

    @property
    def adapted_rows(self) -> int:
        served = self.entries[:, 1]
        return int(np.add.reduce(served) if self.lengths is None else served @ self.lengths)

    @cached_property
    def gathered(self) -> Gathered:
        return Gathered(self)

    def tile_count(self, tile_rows: int) -> int:
        return int(self.gathered.tiles(tile_rows).sum())

    @property
    def list_items(self) -> int:
        return max(self.items, self.parts)


class Gathered:
    """The rows of each composition together.

    Attributes:
        order: rows, those of a composition together, each in the order of the step.
        begins, sizes: of each composition in `order`.
        entries: of each composition.
    """

    def __init__(self, work: Work) -> None:
        by = work.shares.argsort(kind="stable")
        shares = work.shares[by]
        skipped = int(shares.searchsorted(FIRST_SLOT))  # the base's rows and the reference's
        by, shares = by[skipped:], shares[skipped:]
        new = np.ones(len(by) + 1, np.bool_)
        np.not_equal(shares[1:], shares[:-1], out=new[1:-1])
        bounds = new.nonzero()[0]
        self.entries = work.entries[by[bounds[:-1]]]
        if work.lengths is None:
            self.order, self.begins, self.sizes = by, bounds[:-1], bounds[1:] - bounds[:-1]
            return
        lengths = work.lengths[by]
        behind = np.zeros(len(by) + 1, np.int64)
        lengths.cumsum(out=behind[1:])
        first = (work.lengths.cumsum() - work.lengths)[by]
        self.order = np.arange(behind[-1]) + (first - behind[:-1]).repeat(lengths)
        self.begins = behind[bounds[:-1]]
        self.sizes = behind[bounds[1:]] - self.begins

    def tiles(self, tile_rows: int) -> NDArray[np.int64]:
        """How many of so many rows each composition has."""
        return (self.sizes + (tile_rows - 1)) // tile_rows


def natural_shape(work: Work, regime: Regime, tile_rows: int) -> LaunchShape:
    """The smallest shape that holds `work` in one regime."""
    blocks = 1 << (work.most_blocks - 1).bit_length()
    if regime is Regime.ROWS:
        return LaunchShape(regime, work.rows, 1, work.rows, list_length(work.list_items, work.rows), blocks)
    tiles = list_length(work.tile_count(tile_rows), -(-work.rows // tile_rows))
    return LaunchShape(regime, work.rows, tile_rows, tiles, list_length(work.parts, 16), blocks)


def with_tiles(shape: LaunchShape, work: Work, tile_rows: int) -> LaunchShape:
    """`shape`, of the regime of rows, with the tiles of the same rows beside it.

    How many are reckoned with goes by eighths of the rows. From seven on they are left out: no linear would want
    them. Up to `ROOM_FOR_ALL` rows the list has room for a tile a row, so that a graph of this shape is right for
    any plan of so many rows and blocks, however they share.
    """
    eighth = -(-work.rows // 8)
    eighths = -(-work.tile_count(tile_rows) // eighth)
    if eighths > MOST_EIGHTHS:
        return shape
    groups = eighths * eighth
    tiles = work.rows if work.rows <= ROOM_FOR_ALL else groups
    return replace(
        shape, together=LaunchShape(Regime.TILES, work.rows, tile_rows, tiles, 0, shape.blocks, None, groups)
    )


def fits(work: Work, shape: LaunchShape) -> bool:
    if work.rows != shape.rows or work.most_blocks > shape.blocks:
        return False
    if (work.list_items if shape.regime is Regime.ROWS else work.parts) > shape.items:
        return False
    tiled = shape.tiled
    return tiled is None or work.tile_count(tiled.tile_rows) <= tiled.tiles


def list_length(count: int, unit: int) -> int:
    """The least of 1, 1½, 2, 4, 8, … times `unit` that holds `count`."""
    size = unit
    if count > size:
        size = unit + (unit + 1) // 2
    if count > size:
        size = 2 * unit
    while count > size:
        size *= 2
    return size


def fill(shape: LaunchShape, work: Work, buffer: Ints) -> int:
    """Write the plan into `buffer`, int32; how much of it is to be sent. `work` fits `shape`."""
    at, tiled = shape.places, shape.tiled
    if shape.regime is Regime.ROWS:
        _fill_rows(work, _entries(buffer, at.by_row, shape.rows), _entries(buffer, at.items, shape.items))
    if tiled is not None:
        order = buffer[at.order : at.order + shape.rows]
        _fill_tiles(work.gathered, _entries(buffer, at.tiles, tiled.tiles), order, tiled.tile_rows)
    if not work.parts:
        return at.parts
    buffer[at.parts : at.parts + work.parts], buffer[at.weights : at.weights + work.parts] = work.mixed
    return at.end


def _entries(buffer: Ints, begin: int, count: int) -> Ints:
    return buffer[begin : begin + count * ENTRY].reshape(count, ENTRY)


def _fill_rows(work: Work, tiles: Ints, items: Ints) -> None:
    tiles[:] = work.entries if work.lengths is None else work.entries.repeat(work.lengths, axis=0)
    tiles[:, 0] = np.arange(len(tiles), dtype=np.int32)
    blocks, count = tiles[:, 3], work.items
    items[:count] = tiles.repeat(blocks, axis=0)
    before = (blocks << 16) - (blocks.cumsum(dtype=np.int32) - blocks)
    np.add(before.repeat(blocks), np.arange(count, dtype=np.int32), out=items[:count, 3])
    items[count:, 1] = 0


def _fill_tiles(gathered: Gathered, tiles: Ints, order: Ints, tile_rows: int) -> None:
    adapted, sizes = len(gathered.order), gathered.sizes
    order[:adapted], order[adapted:] = gathered.order, 0
    count = gathered.tiles(tile_rows)
    of = np.arange(len(sizes)).repeat(count)
    total = len(of)
    inside = (np.arange(total) - (count.cumsum() - count)[of]) * tile_rows
    gathered.entries.take(of, axis=0, out=tiles[:total], mode="clip")
    np.add(gathered.begins[of], inside, out=tiles[:total, 0], casting="unsafe")
    np.minimum(sizes[of] - inside, tile_rows, out=tiles[:total, 1], casting="unsafe")
    tiles[total:, 1] = 0


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan's lists on the device, at the addresses of its shape."""

    shape: LaunchShape
    tiles: torch.Tensor
    items: torch.Tensor
    order: torch.Tensor
    parts: torch.Tensor
    weights: torch.Tensor
    together: PlanView | None = None


class DevicePlan:
    """The buffer that the kernels of every step read: one allocation, so that addresses stay (I22).

    Args:
        most_rows: of a step.
    """

    def __init__(self, most_rows: int, device: torch.device) -> None:
        self.most_rows = most_rows
        self.size = plan_words(most_rows)
        with torch.inference_mode(False):
            self.memory = torch.zeros(self.size, dtype=torch.int32, device=device)
        self._views: dict[LaunchShape, PlanView | None] = {}

    def view(self, shape: LaunchShape) -> PlanView | None:
        """The lists of a plan of this shape; None if the buffer is too small for them."""
        if shape not in self._views:
            if len(self._views) > 4096:  # steps of ever new sizes
                self._views.clear()
            held = shape.rows <= self.most_rows and shape.places.end <= self.size
            self._views[shape] = self._view(shape) if held else None
        return self._views[shape]

    def _view(self, shape: LaunchShape) -> PlanView:
        at, memory, tiled = shape.places, self.memory, shape.tiled
        order, parts = memory[at.order : at.parts], memory[at.parts : at.weights]
        weights, none = memory[at.weights : at.end].view(torch.float32), memory[:0]
        tiles = memory[at.tiles : at.order]
        together = None if tiled is None else PlanView(tiled, tiles, none, order, parts, weights)
        if together is not None and tiled is shape:
            return together
        return PlanView(shape, memory[: at.items], memory[at.items : at.tiles], none, parts, weights, together)
