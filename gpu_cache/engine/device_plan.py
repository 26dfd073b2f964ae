"""One step's work as the kernels read it: lists of int32 entries at fixed places of a buffer, sent in one pinned copy.

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
`lists` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch

from adapterd.gpu_cache.table_shape import PLAN_ALIGN, PLAN_ENTRY, plan_words


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
        groups: of such tiles, how many `regime_of` and `spread` reckon with.
    """

    regime: Regime
    rows: int
    tile_rows: int
    tiles: int
    items: int
    blocks: int
    together: LaunchShape | None = None
    groups: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Made once, as shapes are looked up in every step; of numbers alone, which are the same in another process."""
        beside = 0 if self.together is None else self.together.tiles + 1
        return hash((self.rows, self.tile_rows, self.tiles, self.items, self.blocks, self.groups, beside))

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
            self.rows * PLAN_ENTRY if alone else 0, self.items * PLAN_ENTRY if alone else 0,
            tiled.tiles * PLAN_ENTRY if tiled else 0, self.rows if tiled else 0, self.items, self.items,
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


@dataclass(frozen=True, slots=True, eq=False)
class PlanView:
    """A plan's lists on the device, at the addresses of its shape. Known by identity."""

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
        known = self._views.get(shape)
        if known is None and shape not in self._views:
            if len(self._views) > 4096:  # steps of ever new sizes
                self._views.clear()
            held = shape.rows <= self.most_rows and shape.places.end <= self.size
            known = self._views[shape] = self._view(shape) if held else None
        return known

    def _view(self, shape: LaunchShape) -> PlanView:
        at, memory, tiled = shape.places, self.memory, shape.tiled
        order, parts = memory[at.order : at.parts], memory[at.parts : at.weights]
        weights, none = memory[at.weights : at.end].view(torch.float32), memory[:0]
        tiles = memory[at.tiles : at.order]
        together = None if tiled is None else PlanView(tiled, tiles, none, order, parts, weights)
        if together is not None and tiled is shape:
            return together
        return PlanView(shape, memory[: at.items], memory[at.items : at.tiles], none, parts, weights, together)
