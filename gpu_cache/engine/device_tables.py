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

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from adapterd.loader.layout import ITEM_BYTES, Dtype

if TYPE_CHECKING:
    from adapterd.gpu_cache.engine.plan import ResidentLike
    from adapterd.gpu_cache.table_shape import TableShape

UNIT_BYTES = 16
"""Of offsets in cells: the widest load of a thread."""
_A, _B, _SCALING = range(3)


class DeviceTables:
    """The cells of all slots on `device`. Not thread-safe: the engine's step lock guards it.

    Attributes:
        cells: int64 [slots · stride].
    """

    def __init__(self, shape: TableShape, device: torch.device) -> None:
        self.shape = shape
        with torch.inference_mode(False):
            self.cells = torch.zeros(shape.slots * shape.stride, dtype=torch.int64, device=device)
        self._uses: list[tuple[object, ...] | None] = [None] * shape.slots

    def why_not(self, resident: ResidentLike) -> str:
        """Why kernels cannot serve `resident`, or nothing."""
        layout, shape = resident.layout, self.shape
        if layout.dtype != shape.dtype:
            return f"adapter is {layout.dtype}, kernels read {shape.dtype} (the cache's `dtype` makes them one)"
        if layout.page_bytes != shape.page_bytes or not 0 <= resident.slot < shape.slots:
            return "adapter is outside of the tables"
        most = max((m.rank for m in resident.manifest.modules), default=0)
        if self.blocks_of(resident) > shape.entries:
            return f"rank {most} has more blocks than the tables have room for"
        return ""

    def missing(self, resident: ResidentLike) -> bool:
        """Whether the slot's row is another's, or none."""
        return self._uses[resident.slot] != _use(resident)

    def write(self, resident: ResidentLike, row: NDArray[np.int64]) -> None:
        """Fill `row`, int64 [stride] in host memory, for a resident that `why_not` has passed.

        The caller enqueues the copy of `row` to `row_of(slot)`, and then says `written`.
        """
        shape = self.shape
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

    def row_of(self, slot: int) -> torch.Tensor:
        """int64 [stride] on the device."""
        return self.cells[slot * self.shape.stride : (slot + 1) * self.shape.stride]

    def written(self, resident: ResidentLike) -> None:
        """The copy of its row has been enqueued."""
        self._uses[resident.slot] = _use(resident)

    def blocks_of(self, resident: ResidentLike) -> int:
        """The most blocks that a module of it has; what a plan's entry walks."""
        index, rows = self.shape.index, self.shape.rows
        return max((-(-m.rank // rows[index[m.name]]) for m in resident.manifest.modules), default=0)

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self.cells.nbytes


def _use(resident: ResidentLike) -> tuple[object, ...]:
    return resident.generation, resident.key


def unit_of(dtype: Dtype) -> int:
    """Elements in `UNIT_BYTES`."""
    return UNIT_BYTES // ITEM_BYTES[dtype]
