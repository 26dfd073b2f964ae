"""One step's work as the kernels read it: lists of int32 entries, made in numpy, sent in one pinned copy.

    tiles [n, 8]   what `expand` does: first row (or first place in `order`), rows, first cell, blocks, start
    items [n, 8]   what `shrink` does in the regime of rows: the same, with blocks << 16 | block
    order [rows]   in the regime of tiles: row numbers, those of one composition together
    parts [n]      cells of the blocks of compositions, from `start`; where start is −1 they are first, first + 1, …
    weights [n]    fp32, beside `parts`

An entry of 0 rows is empty. Entries name cells of a slot and no address, so one plan serves all layers.

A `LaunchShape` fixes grids, list lengths and with them every address: a captured CUDA graph is right for any plan
of its shape (I22). Lists are longer than a step needs, by steps of 1, 1½, 2, 4, … times the rows, so that few
shapes cover many batches; an empty entry costs about a nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapterd.gpu_cache.engine.plan import Segment

ENTRY = 8
_ALIGN = 32  # int32s: lists begin at 128 bytes
Ints = NDArray[np.int32]


class Regime(StrEnum):
    """How rows are worked on; where it changes, a row's bits may (I18)."""

    ROWS = "rows"  # each by itself, without tensor cores
    TILES = "tiles"  # those of a composition together


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """All that grids and addresses depend on: the key of a captured graph.

    Attributes:
        rows: of the step.
        tile_rows: of a tile; 1 in the regime of rows.
        tiles, items: list lengths; `items` bounds `parts`, too.
        blocks: the most blocks of an entry, a power of two.
    """

    regime: Regime
    rows: int
    tile_rows: int
    tiles: int
    items: int
    blocks: int

    @property
    def places(self) -> tuple[int, int, int, int, int, int]:
        """Where tiles, items, order, parts and weights begin, and where all ends; in int32s."""
        items = self.items if self.regime is Regime.ROWS else 0
        order = self.rows if self.regime is Regime.TILES else 0
        ends = [0]
        for size in (self.tiles * ENTRY, items * ENTRY, order, self.items, self.items):
            ends.append(ends[-1] + -(-size // _ALIGN) * _ALIGN)
        return ends[0], ends[1], ends[2], ends[3], ends[4], ends[5]


@dataclass(slots=True)
class Work:
    """The segments of a step that kernels serve, an item a segment; see the module for the words."""

    rows: int
    begin: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    groups: int = 0
    parts: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, segments: Sequence[Segment], rows: int, stride: int, blocks_of: Sequence[int]) -> Work:
        """Args: stride: cells a slot. blocks_of: by slot."""
        work = cls(rows)
        known: dict[object, tuple[int, int, int, int]] = {}
        for segment in segments:
            components = segment.components
            key: object = components[0].identity if len(components) == 1 else tuple(c.identity for c in components)
            entry = known.get(key)
            if entry is None:
                entry = known[key] = work._entry(segment, stride, blocks_of, len(known))
            first, blocks, start, group = entry
            work.begin.append(segment.start)
            work.length.append(segment.rows)
            work.first.append(first)
            work.blocks.append(blocks)
            work.start.append(start)
            work.group.append(group)
        work.groups = len(known)
        return work

    def _entry(self, segment: Segment, stride: int, blocks_of: Sequence[int], group: int) -> tuple[int, int, int, int]:
        components = segment.components
        slot = components[0].resident.slot
        if len(components) == 1 and components[0].weight == 1.0:
            return slot * stride, blocks_of[slot], -1, group
        start = len(self.parts)
        for component in components:
            cell, count = component.resident.slot * stride, blocks_of[component.resident.slot]
            self.parts += range(cell, cell + count)
            self.weights += [component.weight] * count
        return 0, len(self.parts) - start, start, group

    @property
    def most_blocks(self) -> int:
        return max(self.blocks, default=1)

    @property
    def adapted_rows(self) -> int:
        return sum(self.length)

    def tile_count(self, tile_rows: int) -> int:
        per_group = np.zeros(self.groups, np.int64)
        np.add.at(per_group, self.group, self.length)
        return int((-(-per_group // tile_rows)).sum())

    def item_count(self) -> int:
        return max(sum(n * b for n, b in zip(self.length, self.blocks, strict=True)), len(self.parts))


def natural_shape(work: Work, regime: Regime, tile_rows: int) -> LaunchShape:
    """The smallest shape that holds `work`."""
    blocks = 1 << (work.most_blocks - 1).bit_length()
    if regime is Regime.ROWS:
        return LaunchShape(regime, work.rows, 1, work.rows, _bucket(work.item_count(), work.rows), blocks)
    tiles = _bucket(work.tile_count(tile_rows), -(-work.rows // tile_rows))
    return LaunchShape(regime, work.rows, tile_rows, tiles, _bucket(len(work.parts), 16), blocks)


def fits(work: Work, shape: LaunchShape) -> bool:
    if work.rows != shape.rows or work.most_blocks > shape.blocks:
        return False
    if shape.regime is Regime.ROWS:
        return work.item_count() <= shape.items
    return work.tile_count(shape.tile_rows) <= shape.tiles and len(work.parts) <= shape.items


def _bucket(count: int, unit: int) -> int:
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
    at = shape.places
    tiles = buffer[at[0] : at[0] + shape.tiles * ENTRY].reshape(shape.tiles, ENTRY)
    if shape.regime is Regime.ROWS:
        items = buffer[at[1] : at[1] + shape.items * ENTRY].reshape(shape.items, ENTRY)
        _fill_rows(work, tiles, items)
    else:
        _fill_tiles(work, tiles, buffer[at[2] : at[2] + shape.rows], shape.tile_rows)
    if not work.parts:
        return at[3]
    count = len(work.parts)
    buffer[at[3] : at[3] + count] = work.parts
    buffer[at[4] : at[4] + count].view(np.float32)[:] = work.weights
    return at[5]


def _columns(work: Work) -> tuple[Ints, ...]:
    listed = np.array((work.begin, work.length, work.first, work.blocks, work.start), np.int32)
    return tuple(listed)


def _fill_rows(work: Work, tiles: Ints, items: Ints) -> None:
    tiles[:, 1] = 0
    begin, length, first, blocks, start = _columns(work)
    if work.adapted_rows != len(begin):
        of = np.arange(len(begin)).repeat(length)
        behind = length.cumsum()
        begin = np.arange(len(of), dtype=np.int32) + (begin - behind + length)[of]
        first, blocks, start = first[of], blocks[of], start[of]
    entries = np.empty((len(begin), ENTRY), np.int32)
    entries[:, 0], entries[:, 1], entries[:, 2], entries[:, 3], entries[:, 4] = begin, 1, first, blocks, start
    tiles[begin] = entries
    end = blocks.cumsum()
    count = int(end[-1]) if len(end) else 0
    of = np.arange(len(begin)).repeat(blocks)
    entries.take(of, axis=0, out=items[:count], mode="clip")
    items[:count, 3] = (blocks << 16)[of] + np.arange(count) - (end - blocks)[of]
    items[count:, 1] = 0


def _fill_tiles(work: Work, tiles: Ints, order: Ints, tile_rows: int) -> None:
    tiles[:, 1] = 0
    if not work.begin:
        return
    begin, length, first, blocks, start = _columns(work)
    group = np.array(work.group, np.int32)
    if work.groups != len(begin):  # rows of a composition that do not stand together
        by = np.argsort(group, kind="stable")
        begin, length, first, blocks, start, group = (v[by] for v in (begin, length, first, blocks, start, group))
    behind = length.cumsum()
    adapted = int(behind[-1])
    order[:adapted] = np.arange(adapted, dtype=np.int32) + (begin - behind + length).repeat(length)
    order[adapted:] = 0
    heads = np.flatnonzero(np.diff(group, prepend=-1))
    size = np.add.reduceat(length, heads)
    count = -(-size // tile_rows)
    of = np.arange(len(heads)).repeat(count)
    inside = (np.arange(len(of)) - (count.cumsum() - count)[of]) * tile_rows
    tiles[: len(of), 0] = ((behind - length)[heads])[of] + inside
    tiles[: len(of), 1] = np.minimum(size[of] - inside, tile_rows)
    for column, values in ((2, first), (3, blocks), (4, start)):
        tiles[: len(of), column] = values[heads][of]


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan's lists on the device, at the addresses of its shape."""

    shape: LaunchShape
    tiles: torch.Tensor
    items: torch.Tensor
    order: torch.Tensor
    parts: torch.Tensor
    weights: torch.Tensor


class DevicePlan:
    """The buffer that the kernels of every step read: one allocation, so that addresses stay (I22).

    Args:
        most_rows: of a step.
    """

    def __init__(self, most_rows: int, device: torch.device) -> None:
        self.most_rows = most_rows
        self.size = 64 * most_rows + 16 * ENTRY * _ALIGN
        with torch.inference_mode(False):
            self.memory = torch.zeros(self.size, dtype=torch.int32, device=device)
        self._views: dict[LaunchShape, PlanView] = {}

    def holds(self, shape: LaunchShape) -> bool:
        return shape.rows <= self.most_rows and shape.places[-1] <= self.size

    def view(self, shape: LaunchShape) -> PlanView:
        known = self._views.get(shape)
        if known is None:
            cut = [self.memory[begin:end] for begin, end in zip(shape.places, shape.places[1:], strict=False)]
            known = PlanView(shape, cut[0], cut[1], cut[2], cut[3], cut[4].view(torch.float32))
            if len(self._views) > 4096:  # steps of ever new sizes
                self._views.clear()
            self._views[shape] = known
        return known
