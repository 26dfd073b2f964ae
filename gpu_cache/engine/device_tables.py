"""Where every rank block of every resident lies, on the device: one row of cells a slot, for all linears.

    cells[slot, 0, matrix, block] int64    A:  (offset in the arena in 16-byte units << 8) | rank rows
    cells[slot, 1, matrix, block] int64    Bᵀ: the same
    cells[slot, 2, matrix, block]          scaling, as fp32 in the low half

A matrix is one served module of the base, so a fused linear has several. What an adapter leaves alone has zero
rows. All that belongs to a slot stands together: a resident that comes into a slot is one copy.

The memory is allocated once, and its address never changes (I22). A row is overwritten in the stream in which the
kernels run that read it, so they need no fence against each other; `fast_path` sees to it that there is one such
stream at a time. Host memory that a copy reads from belongs to the plan ring's slot (`device_plan`), whose event
says when it may be written again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from adapterd.loader.layout import ITEM_BYTES, Dtype, block_rows

if TYPE_CHECKING:
    from adapterd.gpu_cache.engine.plan import ResidentLike
    from adapterd.loader.manifest import ModuleEntry

UNIT_BYTES = 16
"""Of offsets in cells: the widest load of a thread."""
_A, _B, _SCALING = range(3)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One served module: its row in the tables is its place in the list it stands in."""

    name: str
    in_features: int
    out_features: int


def rows_of_block(matrix: Matrix, dtype: Dtype, page_bytes: int) -> int:
    """Rank rows of a block of this module, as the loader cuts it; 1 where it could not, so that no adapter has it."""
    if max(matrix.in_features, matrix.out_features) * ITEM_BYTES[dtype] > page_bytes:
        return 1
    return block_rows(cast("ModuleEntry", matrix), dtype, page_bytes)


class TableShape:
    """Sizes of the tables for the modules that an engine serves.

    Args:
        matrices: served modules.
        slots: of the cache.
        max_rank: of one module of one adapter, that the tables have room for.
        dtype, page_bytes: of the arena that kernels read.

    Attributes:
        slots: that the tables have room for; residents in others are not served.
        rows: rank rows of a block, by matrix.
        entries: cells a matrix, a power of two.
        stride: cells a slot.
    """

    def __init__(self, matrices: Sequence[Matrix], slots: int, max_rank: int, dtype: Dtype, page_bytes: int) -> None:
        self.matrices, self.dtype, self.page_bytes = tuple(matrices), dtype, page_bytes
        self.index: Mapping[str, int] = {matrix.name: i for i, matrix in enumerate(self.matrices)}
        self.rows = tuple(rows_of_block(matrix, dtype, page_bytes) for matrix in self.matrices)
        most = max(-(-max_rank // rows) for rows in self.rows)
        self.entries = max(2, 1 << (most - 1).bit_length())  # two at least: every matrix begins at 16 bytes
        self.plane = len(self.matrices) * self.entries
        self.stride = 3 * self.plane
        self.slots = min(slots, (2**31 - 1) // self.stride)  # cells have 32-bit numbers


class DeviceTables:
    """The cells of all slots on `device`. Not thread-safe: the engine's step lock guards it.

    Attributes:
        cells: int64 [slots · stride].
        blocks: by slot, the most blocks that a module of its adapter has; what a plan entry walks.
    """

    def __init__(self, shape: TableShape, device: torch.device) -> None:
        self.shape = shape
        with torch.inference_mode(False):
            self.cells = torch.zeros(shape.slots * shape.stride, dtype=torch.int64, device=device)
        self.blocks = [0] * shape.slots
        self._uses: list[tuple[object, ...] | None] = [None] * shape.slots

    def why_not(self, resident: ResidentLike) -> str:
        """Why kernels cannot serve `resident`, or nothing."""
        layout, shape = resident.layout, self.shape
        if layout.dtype != shape.dtype:
            return f"adapter is {layout.dtype}, kernels read {shape.dtype} (the cache's `dtype` makes them one)"
        if layout.page_bytes != shape.page_bytes or not 0 <= resident.slot < shape.slots:
            return "adapter is outside of the tables"
        most = max((m.rank for m in resident.manifest.modules), default=0)
        if self._blocks_of(resident) > shape.entries:
            return f"rank {most} has more blocks than the tables have room for"
        return ""

    def missing(self, resident: ResidentLike) -> bool:
        """Whether the slot's row is another's, or none."""
        return self._uses[resident.slot] != _use(resident)

    def write(self, resident: ResidentLike, row: NDArray[np.int64]) -> None:
        """Fill `row`, int64 [stride] in host memory, for a resident that `why_not` has passed, and call it the slot's.

        The caller enqueues the copy of `row` to `row_of(slot)`.
        """
        shape, slot = self.shape, resident.slot
        row[:] = 0
        cells = row.reshape(3, len(shape.matrices), shape.entries)
        modules = resident.manifest.modules
        at = np.fromiter((shape.index[m.name] for m in modules), np.int64, len(modules))
        scaling = np.fromiter((m.scaling for m in modules), np.float32, len(modules))
        cells[_SCALING, at] = scaling.view(np.uint32).astype(np.int64)[:, None]
        table = resident.layout.table.astype(np.int64)
        module, side, first, rows, _, page, offset = table.T
        begin = np.asarray(resident.pages, np.int64)[page] * shape.page_bytes + offset
        block = first // np.asarray(shape.rows, np.int64)[at[module]]
        cells[side, at[module], block] = (begin // UNIT_BYTES << 8) | rows
        self.blocks[slot] = int(block.max(initial=0)) + 1
        self._uses[slot] = _use(resident)

    def row_of(self, slot: int) -> torch.Tensor:
        """int64 [stride] on the device."""
        return self.cells[slot * self.shape.stride : (slot + 1) * self.shape.stride]

    def forget(self, slot: int) -> None:
        """The copy of the slot's row was not enqueued."""
        self._uses[slot] = None

    def _blocks_of(self, resident: ResidentLike) -> int:
        index, rows = self.shape.index, self.shape.rows
        return max((-(-m.rank // rows[index[m.name]]) for m in resident.manifest.modules), default=0)


def _use(resident: ResidentLike) -> tuple[object, ...]:
    return resident.generation, resident.key


def unit_of(dtype: Dtype) -> int:
    """Elements in `UNIT_BYTES`."""
    return UNIT_BYTES // ITEM_BYTES[dtype]
