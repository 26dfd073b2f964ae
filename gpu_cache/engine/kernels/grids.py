"""Grids and constants of the two kernels of a linear: what its form, a step's shape and dtypes make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapterd.gpu_cache.engine.device_plan import LaunchShape, Regime
from adapterd.gpu_cache.engine.kernels.configs import LANES_KEPT, Configs, Key, spread
from adapterd.gpu_cache.engine.kernels.forms import Form

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
STRIPS = tuple(1 << bit for bit in range(4, 13))
"""Columns that a program of `expand` may have, 16 to 4096."""
_TRITON: Mapping[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
DTYPES = frozenset(_TRITON)
LEAST_SHARED_MEMORY = 99 << 10
"""Bytes that a program may have on any card from sm_80 on."""
MOST_KEPT = 4096
"""Launches that are remembered before all are forgotten: steps may be of ever new sizes."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Grids and constants of both kernels for a form, a shape and dtypes."""

    shrink_grid: tuple[int, ...]
    shrink: Mapping[str, Any]
    expand_grid: tuple[int, ...]
    expand: Mapping[str, Any]
    strips: Tensor
    planes: int


class Grids:
    """Makes each launch once.

    Args:
        forms: all that will be launched.
        device: of the arena.
        adapter: dtype of the adapters in it that kernels read.
        entries: cells a matrix.
        pdl: programmatic dependent launch; sm_90 and later.
        shared_memory: bytes that a program may have.
    """

    def __init__(
        self,
        forms: Sequence[Form],
        device: torch.device,
        adapter: torch.dtype,
        entries: int,
        configs: Configs,
        *,
        batch_invariant: bool,
        pdl: bool,
        shared_memory: int,
    ) -> None:
        self._adapter, self._entries, self._unit = adapter, entries, 16 // adapter.itemsize
        self._batch_invariant, self._pdl = batch_invariant, pdl and not INTERPRETED
        self._shared_memory, self.configs = shared_memory, configs
        self._strips: dict[tuple[Form, int], Tensor] = {
            (form, columns): torch.tensor(form.strips(columns), dtype=torch.int32, device=device)
            for form in dict.fromkeys(forms)
            for columns in STRIPS
        }
        self._launches: dict[tuple[Form, LaunchShape, torch.dtype, torch.dtype], Launch] = {}

    def use(self, configs: Configs) -> None:
        """Other configurations from now on."""
        self.configs = configs
        self._launches.clear()

    def of(self, form: Form, shape: LaunchShape, x: torch.dtype, y: torch.dtype) -> Launch:
        key = (form, shape, x, y)
        known = self._launches.get(key)
        if known is None:
            if len(self._launches) >= MOST_KEPT:
                self._launches.clear()
            make = self._rows_launch if shape.regime is Regime.ROWS else self._tiles_launch
            known = self._launches[key] = make(form, shape, x, y)
        return known

    # --- one regime each

    def _rows_launch(self, form: Form, shape: LaunchShape, x: torch.dtype, y: torch.dtype) -> Launch:
        wide = max(x.itemsize, self._adapter.itemsize)
        config = self.configs.rows(key_of(form, shape), wide)
        part = _part(form.in_features, config.split, config.block_k)
        columns, even = _strip(form, config.block_n)
        shared = self._shared(form, shape, config.split)
        shrink = {
            **shared, "K": form.in_features, "K_PART": part, "BLOCK_K": config.block_k,
            "EVEN": part * config.split == form.in_features, "num_warps": config.shrink_warps, "num_stages": 3,
            **self._dependent(),
        }  # fmt: skip
        expand = {
            **shared, "N": form.out_features, "BLOCK_N": columns, "STEP": form.step, "EVEN": even,
            "num_warps": config.expand_warps, "num_stages": 1, **self._dependent(),
        }  # fmt: skip
        strips = self._strips[form, columns]
        return Launch(
            (shape.items, config.split * len(form.slices)), shrink,
            (len(strips), shape.rows), expand, strips, config.split * shape.rows * shared["WIDTH"],
        )  # fmt: skip

    def _tiles_launch(self, form: Form, shape: LaunchShape, x: torch.dtype, y: torch.dtype) -> Launch:
        wide = max(x.itemsize, self._adapter.itemsize)
        key = key_of(form, shape)
        config = self.configs.tiles(key, wide, batch_invariant=self._batch_invariant)
        if not self._batch_invariant:
            config = spread(config, key, shape.groups)
        part = _part(form.in_features, config.split, config.block_k)
        shared = self._shared(form, shape, config.split)
        split = shared.pop("SPLIT")
        width, lanes = shared["WIDTH"], max(16, config.lanes)
        columns, even = _strip(form, config.block_n * config.walk)
        block_n = min(config.block_n, columns)
        most = max(16, min(LANES_KEPT if wide == 2 else 64, shape.blocks * form.rows))
        shrink_operand, shrink_precision = self._shrink_product(x)
        operand, precision = self._expand_product(y)
        shrink = {
            **shared, "K": form.in_features, "K_PART": part, "SLICES": len(form.slices), "LANES": lanes,
            "BLOCK_M": shape.tile_rows, "BLOCK_K": config.block_k,
            "STAGES": self._stages(config.shrink_stages, wide * config.block_k * (lanes + shape.tile_rows)),
            "OPERAND": shrink_operand, "PRECISION": shrink_precision,
            "EVEN": part * split == form.in_features, "num_warps": config.shrink_warps,
            **self._dependent(),
        }  # fmt: skip
        expand = {
            **shared, "N": form.out_features, "SPLIT": split, "FEW": min(16, most), "MANY": most,
            "BLOCK_M": shape.tile_rows, "BLOCK_N": block_n, "WALK": columns // block_n,
            "STAGES": self._stages(config.expand_stages, wide * block_n * (most + shape.tile_rows)),
            "STEP": form.step, "OPERAND": operand, "PRECISION": precision, "EVEN": even,
            "num_warps": config.expand_warps, **self._dependent(),
        }  # fmt: skip
        strips = self._strips[form, columns]
        return Launch(
            (shape.tiles, split, -(-width // lanes)), shrink,
            (len(strips), shape.tiles), expand, strips, split * shape.rows * width,
        )  # fmt: skip

    def _shared(self, form: Form, shape: LaunchShape, split: int) -> dict[str, Any]:
        return {
            "ENTRIES": self._entries,
            "BLOCKS": shape.blocks,
            "ROWS": form.rows,
            "WIDTH": len(form.slices) * shape.blocks * form.rows,
            "SPLIT": split,
            "UNIT": self._unit,
            "PDL": self._pdl,
        }

    def _stages(self, wanted: int, nbytes: int) -> int:
        """As many as wanted, if that many of `nbytes` find room in shared memory; a tenth of it is for other things."""
        return max(1, min(wanted, self._shared_memory * 9 // 10 // nbytes))

    def _dependent(self) -> dict[str, Any]:
        return {"launch_pdl": True} if self._pdl else {}

    def _shrink_product(self, x: torch.dtype) -> tuple[Any, str]:
        """(dtype, precision) of the operands on tensor cores, which sum in fp32: every product of two bytes is exact.

        tf32 holds fp16 and bf16, for the rare layer whose type is not the adapter's.
        """
        adapter = self._adapter
        if INTERPRETED or torch.float32 in {x, adapter}:
            return tl.float32, "ieee"
        return (_TRITON[adapter], "ieee") if x == adapter else (tl.float32, "tf32")

    def _expand_product(self, y: torch.dtype) -> tuple[Any, str]:
        """The same for h B. For bf16 h is rounded to bf16; for fp16 to tf32, in which a large h cannot overflow."""
        adapter = self._adapter
        if INTERPRETED or torch.float32 in {y, adapter}:
            return tl.float32, "ieee"
        return (tl.bfloat16, "ieee") if y == adapter == torch.bfloat16 else (tl.float32, "tf32")


def key_of(form: Form, shape: LaunchShape) -> Key:
    """What configurations are looked up by.

    Tiles are as wide as the largest rank needs. Rows one by one are each as wide as their own rank, so where the
    list of blocks is at most half as long as it would be for the largest alone, it is half of that.
    """
    blocks = shape.blocks
    if shape.regime is Regime.ROWS and blocks > 2 and 2 * shape.items <= blocks * shape.rows:
        blocks //= 2
    return form.in_features, form.out_features, len(form.slices), blocks * form.rows, shape.rows


def _part(k: int, split: int, block_k: int) -> int:
    """Elements of K of a part: whole blocks."""
    return -(-k // (split * block_k)) * block_k


def _strip(form: Form, columns: int) -> tuple[int, bool]:
    """(columns of a strip, whether every slice is whole strips), at most `columns`."""
    widths = [width for _, width in form.slices]
    size = min(columns, STRIPS[-1])
    while size >= 64:
        if all(width % size == 0 for width in widths):
            return size, True
        size //= 2
    return max(16, min(columns, STRIPS[-1], 1 << (max(widths) - 1).bit_length())), False
