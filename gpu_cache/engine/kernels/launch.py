"""Launches the two kernels of a linear: grids, constants and memory for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapterd.gpu_cache.engine.device_plan import LaunchShape, PlanView, Regime
from adapterd.gpu_cache.engine.kernels.configs import LANES_KEPT, Configs, Key, regime_of
from adapterd.gpu_cache.engine.kernels.expand import expand_rows, expand_tiles
from adapterd.gpu_cache.engine.kernels.forms import Form, Linear
from adapterd.gpu_cache.engine.kernels.shrink import shrink_rows, shrink_tiles
from adapterd.gpu_cache.engine.kernels.tuned import configs_for

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


@dataclass(frozen=True, slots=True)
class Launch:
    """Grids and constants of both kernels for a form, a shape and dtypes."""

    shrink_grid: tuple[int, ...]
    shrink: Mapping[str, Any]
    expand_grid: tuple[int, ...]
    expand: Mapping[str, Any]
    strips: Tensor
    planes: int


class Launcher:
    """Runs linears. Not thread-safe: planes of partial sums are shared, in stream order.

    Args:
        forms: all that will be run.
        arena: uint8.
        adapter_dtype: of the adapters in it that kernels read.
        entries: cells a matrix.
        pdl: programmatic dependent launch; sm_90 and later.
        shared_memory: bytes that a program may have; None asks the device.
        tuning: a file with a tuning table, or where else configurations come from; by default the table that is
            shipped for the device, if there is one, and the rule.

    Raises:
        Failed: SETTINGS_INVALID, the file is no tuning table. NotFound: PATH_NOT_FOUND.
    """

    def __init__(
        self,
        forms: Sequence[Form],
        arena: Tensor,
        adapter_dtype: torch.dtype,
        entries: int,
        *,
        batch_invariant: bool = False,
        pdl: bool = False,
        shared_memory: int | None = None,
        tuning: Path | Configs | None = None,
    ) -> None:
        self._arena = arena[: arena.numel() // 16 * 16].view(adapter_dtype)
        self._entries, self._unit = entries, 16 // adapter_dtype.itemsize
        self._batch_invariant, self._pdl = batch_invariant, pdl and not INTERPRETED
        self._shared_memory = shared_memory_of(arena.device) if shared_memory is None else shared_memory
        if tuning is None or isinstance(tuning, Path):
            tuning = configs_for(_name(arena.device), tuning)
        self.configs: Configs = tuning
        self._strips: dict[tuple[Form, int], Tensor] = {
            (form, columns): torch.tensor(form.strips(columns), dtype=torch.int32, device=arena.device)
            for form in dict.fromkeys(forms)
            for columns in STRIPS
        }
        self._launches: dict[tuple[Form, LaunchShape, torch.dtype, torch.dtype], Launch] = {}
        self._planes = [torch.empty(0, dtype=torch.float32, device=arena.device)]

    def run(
        self, linear: Linear, plan: PlanView, x: Tensor, y: Tensor, *, shrink: bool = True, expand: bool = True
    ) -> None:
        """y [rows, out] += what the plan's adapters add for x [rows, in]; both contiguous, dtypes of `DTYPES`.

        Args:
            shrink, expand: False leaves one of the kernels out, for who times the other.
        """
        plan = self.chosen(linear.form, plan)
        launch = self.launch_of(linear.form, plan.shape, x.dtype, y.dtype)
        planes = self._planes_of(launch.planes)
        with self._on_device():
            if shrink:
                self._shrink(linear, plan, launch, x, planes)
            if expand:
                self._expand(linear, plan, launch, y, planes)

    def _shrink(self, linear: Linear, plan: PlanView, launch: Launch, x: Tensor, planes: Tensor) -> None:
        rows = plan.shape.rows
        if plan.shape.regime is Regime.ROWS:
            shrink_rows[launch.shrink_grid](
                x, self._arena, linear.a, linear.scales, planes, plan.items, plan.parts, plan.weights, rows,
                **launch.shrink,
            )  # fmt: skip
        else:
            shrink_tiles[launch.shrink_grid](
                x, self._arena, linear.a, linear.scales, planes, plan.order, plan.tiles, plan.parts, plan.weights,
                rows, **launch.shrink,
            )  # fmt: skip

    def _expand(self, linear: Linear, plan: PlanView, launch: Launch, y: Tensor, planes: Tensor) -> None:
        rows = plan.shape.rows
        if plan.shape.regime is Regime.ROWS:
            expand_rows[launch.expand_grid](
                y, self._arena, linear.b, planes, plan.tiles, launch.strips, plan.parts, rows, **launch.expand
            )
        else:
            expand_tiles[launch.expand_grid](
                y, self._arena, linear.b, planes, plan.order, plan.tiles, launch.strips, plan.parts, rows,
                **launch.expand,
            )  # fmt: skip

    def use(self, configs: Configs) -> None:
        """Other configurations from now on. Graphs that were captured keep theirs."""
        self.configs = configs
        self._launches.clear()

    def chosen(self, form: Form, plan: PlanView) -> PlanView:
        """The lists of the regime that is the linear's, where a plan has both."""
        tiled = plan.together
        if tiled is None:
            return plan
        regime = regime_of(key_of(form, plan.shape), tiled.shape.groups)
        return tiled if regime is Regime.TILES else plan

    def warm_up(
        self,
        linears: Iterable[Linear],
        plans: Iterable[PlanView],
        dtypes: Iterable[tuple[torch.dtype, torch.dtype]],
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Compile and load the kernels of these linears, one of each form, for plans that are empty, by running them.

        Plans that need the same kernels count once: it is bounded by forms, regimes, powers of two of the rank and
        `dtypes`, whatever the numbers of rows are.

        Args:
            dtypes: (of x, of y).
            progress: told (done, of how many) after each.
        """
        wanted: dict[object, tuple[Linear, PlanView, torch.dtype, torch.dtype]] = {}
        for given, (x, y), linear in product(list(plans), list(dtypes), {one.form: one for one in linears}.values()):
            plan = self.chosen(linear.form, given)
            launch = self.launch_of(linear.form, plan.shape, x, y)
            kernels = frozenset(launch.shrink.items()), frozenset(launch.expand.items())
            wanted.setdefault((plan.shape.regime, x, y, *kernels), (linear, plan, x, y))
        for done, (linear, plan, *pair) in enumerate(wanted.values(), 1):
            nothing = [torch.empty(16, dtype=dtype, device=self._arena.device) for dtype in pair]  # nobody reads it
            self.run(linear, plan, *nothing)
            if progress is not None:
                progress(done, len(wanted))

    def launch_of(self, form: Form, shape: LaunchShape, x: torch.dtype, y: torch.dtype) -> Launch:
        key = (form, shape, x, y)
        known = self._launches.get(key)
        if known is None:
            if len(self._launches) > 4096:  # steps of ever new sizes
                self._launches.clear()
            make = self._rows_launch if shape.regime is Regime.ROWS else self._tiles_launch
            known = self._launches[key] = make(form, shape, x, y)
        return known

    # --- one regime each

    def _rows_launch(self, form: Form, shape: LaunchShape, x: torch.dtype, y: torch.dtype) -> Launch:
        wide = max(x.itemsize, self._arena.dtype.itemsize)
        config = self.configs.rows(key_of(form, shape), wide)
        part = _part(form.in_features, config.split, config.block_k)
        columns, even = _strip(form, config.block_n)
        shared = self._shared(form, shape, config.split)
        shrink = {
            **shared, "K": form.in_features, "K_PART": part, "BLOCK_K": config.block_k,
            "EVEN": part * config.split == form.in_features, "num_warps": config.shrink_warps, "num_stages": 3,
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
        wide = max(x.itemsize, self._arena.dtype.itemsize)
        config = self.configs.tiles(key_of(form, shape), wide, batch_invariant=self._batch_invariant)
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
        adapter = self._arena.dtype
        if INTERPRETED or torch.float32 in {x, adapter}:
            return tl.float32, "ieee"
        return (_TRITON[adapter], "ieee") if x == adapter else (tl.float32, "tf32")

    def _expand_product(self, y: torch.dtype) -> tuple[Any, str]:
        """The same for h B. For bf16 h is rounded to bf16; for fp16 to tf32, in which a large h cannot overflow."""
        adapter = self._arena.dtype
        if INTERPRETED or torch.float32 in {y, adapter}:
            return tl.float32, "ieee"
        return (tl.bfloat16, "ieee") if y == adapter == torch.bfloat16 else (tl.float32, "tf32")

    # --- memory and device

    def _planes_of(self, size: int) -> Tensor:
        """fp32 scratch. Former ones are kept: captured graphs know their addresses."""
        if self._planes[-1].numel() < size:
            with torch.inference_mode(False):
                self._planes.append(torch.empty(2 * size, dtype=torch.float32, device=self._arena.device))
        return self._planes[-1]

    def _on_device(self) -> AbstractContextManager[object]:
        device = self._arena.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(device)


def _name(device: torch.device) -> str:
    """Of the card, as tuning tables say it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def shared_memory_of(device: torch.device) -> int:
    """Bytes that a program may have."""
    if device.type != "cuda":
        return LEAST_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_MEMORY))


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
