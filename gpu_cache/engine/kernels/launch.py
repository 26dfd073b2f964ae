"""Launches the two kernels of a linear, each by one call that stands ready: memory for them, compiling ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from torch import Tensor

from adapterd.gpu_cache.engine.device_plan import LaunchShape, PlanView, Regime
from adapterd.gpu_cache.engine.kernels.configs import Configs, regime_of
from adapterd.gpu_cache.engine.kernels.direct import OFFERED, Call, Direct, watched
from adapterd.gpu_cache.engine.kernels.expand import expand_rows, expand_tiles
from adapterd.gpu_cache.engine.kernels.forms import Form, Linear
from adapterd.gpu_cache.engine.kernels.grids import LEAST_SHARED_MEMORY, Grids, Launch, key_of
from adapterd.gpu_cache.engine.kernels.shrink import shrink_rows, shrink_tiles
from adapterd.gpu_cache.engine.kernels.tuned import configs_for

MOST_BOUND = 1 << 13
"""Linears in steps of some shape that are remembered before all are forgotten, about 2 KB each."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Both kernels of a linear for the lists of a step, and the regime that they work in."""

    regime: Regime
    shrink: Call
    expand: Call


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

    Attributes:
        direct: whether compiled kernels are launched past Triton's Python (`direct`), where that is offered.

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
        self._arena, self._device = arena[: arena.numel() // 16 * 16].view(adapter_dtype), arena.device
        if tuning is None or isinstance(tuning, Path):
            tuning = configs_for(_name(arena.device), tuning)
        self._grids = Grids(
            forms, arena.device, adapter_dtype, entries, tuning, batch_invariant=batch_invariant, pdl=pdl,
            shared_memory=shared_memory_of(arena.device) if shared_memory is None else shared_memory,
        )  # fmt: skip
        self._planes = [torch.empty(0, dtype=torch.float32, device=arena.device)]
        self.direct = OFFERED and arena.is_cuda
        self._calls = Direct()
        self._bound: dict[tuple[Linear, PlanView, torch.dtype, torch.dtype], Bound] = {}

    @property
    def configs(self) -> Configs:
        return self._grids.configs

    def use(self, configs: Configs) -> None:
        """Other configurations from now on. Graphs that were captured keep theirs."""
        self._grids.use(configs)
        self._bound.clear()

    def run(
        self, linear: Linear, plan: PlanView, x: Tensor, y: Tensor, *, shrink: bool = True, expand: bool = True
    ) -> Regime:
        """y [rows, out] += what the plan's adapters add for x [rows, in]; both contiguous, dtypes of `DTYPES`.

        Args:
            shrink, expand: False leaves one of the kernels out, for who times the other.

        Returns:
            How it was done.
        """
        bound = self._bound.get((linear, plan, x.dtype, y.dtype))
        if bound is None:
            bound = self._bind(linear, plan, x.dtype, y.dtype)
        if self._device.type != "cuda" or self._device.index == torch.cuda.current_device():
            self._launch(bound, x if shrink else None, y if expand else None)
        else:
            with torch.cuda.device(self._device):
                self._launch(bound, x if shrink else None, y if expand else None)
        return bound.regime

    def _launch(self, bound: Bound, x: Tensor | None, y: Tensor | None) -> None:
        stream = None
        if self.direct and not watched():
            stream = triton.runtime.driver.active.get_current_stream(self._device.index)
        if x is not None:
            bound.shrink(x, stream)
        if y is not None:
            bound.expand(y, stream)

    def chosen(self, form: Form, plan: PlanView) -> PlanView:
        """The lists of the regime that is the linear's, where a plan has both."""
        tiled = plan.together
        if tiled is None:
            return plan
        regime = regime_of(key_of(form, plan.shape), tiled.shape.groups)
        return tiled if regime is Regime.TILES else plan

    def launch_of(self, form: Form, shape: LaunchShape, x: torch.dtype, y: torch.dtype) -> Launch:
        return self._grids.of(form, shape, x, y)

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
            nothing = [torch.empty(16, dtype=dtype, device=self._device) for dtype in pair]  # nobody reads it
            self.run(linear, plan, *nothing)
            if progress is not None:
                progress(done, len(wanted))

    # --- what is bound

    def _bind(self, linear: Linear, given: PlanView, x: torch.dtype, y: torch.dtype) -> Bound:
        plan = self.chosen(linear.form, given)
        launch = self.launch_of(linear.form, plan.shape, x, y)
        if len(self._bound) >= MOST_BOUND:
            self._bound.clear()
        planes = self._planes_of(launch.planes)
        bind = self._bind_rows if plan.shape.regime is Regime.ROWS else self._bind_tiles
        bound = self._bound[linear, given, x, y] = bind(linear, plan, launch, planes)
        return bound

    def _bind_rows(self, linear: Linear, plan: PlanView, launch: Launch, planes: Tensor) -> Bound:
        rows, call = plan.shape.rows, self._calls.call
        before = self._arena, linear.a, linear.scales, planes, plan.items, plan.parts, plan.weights, rows
        behind = self._arena, linear.b, planes, plan.tiles, launch.strips, plan.parts, rows
        return Bound(
            Regime.ROWS,
            call(shrink_rows, launch.shrink_grid, before, launch.shrink),
            call(expand_rows, launch.expand_grid, behind, launch.expand),
        )

    def _bind_tiles(self, linear: Linear, plan: PlanView, launch: Launch, planes: Tensor) -> Bound:
        rows, lists, call = plan.shape.rows, (plan.order, plan.tiles), self._calls.call
        before = self._arena, linear.a, linear.scales, planes, *lists, plan.parts, plan.weights, rows
        behind = self._arena, linear.b, planes, *lists, launch.strips, plan.parts, rows
        return Bound(
            Regime.TILES,
            call(shrink_tiles, launch.shrink_grid, before, launch.shrink),
            call(expand_tiles, launch.expand_grid, behind, launch.expand),
        )

    def _planes_of(self, size: int) -> Tensor:
        """fp32 scratch. Former ones are kept: captured graphs know their addresses."""
        if self._planes[-1].numel() < size:
            with torch.inference_mode(False):
                self._planes.append(torch.empty(2 * size, dtype=torch.float32, device=self._device))
        return self._planes[-1]


def _name(device: torch.device) -> str:
    """Of the card, as tuning tables say it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def shared_memory_of(device: torch.device) -> int:
    """Bytes that a program may have."""
    if device.type != "cuda":
        return LEAST_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_MEMORY))
