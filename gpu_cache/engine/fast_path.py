"""The kernels of one engine: tables and plan on the device, and what of a step they serve.

Before the model runs, a step's plan is made and enqueued: rows of the tables for residents that are new in their
slots, then the lists. All kernels of the step read these and the arena, at addresses that never change (I22), so
a CUDA graph that was captured in one step may be replayed in another of the same `LaunchShape`.

**Streams.** Copies and kernels of an engine are in one stream, so they need no fences among themselves: what a
step overwrites, the kernels before it in the stream have read. When the caller's stream changes between steps, the
new one first waits for the old one. (A capture has a stream of its own, but nothing is executed in it.)

What kernels cannot serve is the reference's: see `Prepared`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adapterd.gpu_cache.engine.device_plan import (
    DevicePlan,
    LaunchShape,
    PlanView,
    Regime,
    Work,
    fill,
    fits,
    natural_shape,
)
from adapterd.gpu_cache.engine.device_tables import DeviceTables, Matrix, TableShape
from adapterd.gpu_cache.engine.kernels.configs import tile_rows
from adapterd.gpu_cache.engine.kernels.launch import DTYPES, Form, Launcher, Linear, linear_of
from adapterd.gpu_cache.engine.plan_ring import PlanRing, RingSlot
from adapterd.gpu_cache.engine.tables import TORCH_DTYPE
from adapterd.loader.errors import Code, error
from adapterd.loader.layout import Dtype

if TYPE_CHECKING:
    from adapterd.gpu_cache.device import Stream
    from adapterd.gpu_cache.engine.layers import Site
    from adapterd.gpu_cache.engine.plan import BatchPlan, ResidentLike, Segment, ServingCache

MOST_ROWS = 16_384
"""Rows of a step that the plan's buffers hold; a longer one is the reference's."""
STAGED_ROWS = 64
"""Table rows of a step that go through pinned memory; more of them are copied at once, which takes longer."""
FEW_ROWS = 64
"""Up to this many, rows are worked on one by one even if they share adapters: measured on one H200."""
SOME_ROWS = 256
"""Up to this many, if on average fewer than two share a composition."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step as the kernels will run it.

    Attributes:
        view: the plan's lists; None if no row of the step is the kernels'.
        reference: segments that are the reference's.
        reasons: why, each once, sorted.
    """

    view: PlanView | None
    reference: tuple[Segment, ...]
    reasons: tuple[str, ...]


class FastPath:
    """Not thread-safe: the engine's step lock guards it.

    Args:
        cache: the arena's; its device is where everything is allocated, once.
        sites: what the engine serves.
        dtype: of the adapters that kernels read; others are the reference's.
        max_rank: of one module of one adapter that the tables have room for.
        batch_invariant: rows are always worked on in tiles, with fixed parts of K.
        pdl: programmatic dependent launch, for sm_90 and later.
    """

    def __init__(
        self,
        cache: ServingCache[Any],
        sites: Sequence[Site],
        dtype: Dtype,
        *,
        max_rank: int,
        batch_invariant: bool = False,
        pdl: bool = False,
    ) -> None:
        arena, config = cache.arena, cache.config
        matrices = [Matrix(s.path, site.in_features, s.width) for site in sites for s in site.slices]
        shape = TableShape(matrices, config.max_residents, max_rank, dtype, config.page_bytes)
        self._tables = DeviceTables(shape, arena.device)
        self._plan = DevicePlan(MOST_ROWS, arena.device)
        staged = min(STAGED_ROWS, config.max_residents)
        self._ring = PlanRing(self._plan.size, staged, shape.stride, pinned=arena.device.type == "cuda")
        self._device = cache.device
        self._stream: Stream | None = None
        self._batch_invariant = batch_invariant
        self._linears: dict[str, Linear] = {}
        forms = {site.path: form for site, form in zip(sites, _forms(sites, shape), strict=True)}
        self.launcher = Launcher(
            list(forms.values()), arena, TORCH_DTYPE[dtype], shape.entries, batch_invariant=batch_invariant, pdl=pdl
        )
        first = 0
        for site in sites:
            self._linears[site.path] = linear_of(forms[site.path], self._tables, first)
            first += len(site.slices)
        self._verdicts: dict[int, tuple[ResidentLike, str]] = {}
        self._sent: tuple[BatchPlan, LaunchShape | None, Prepared] | None = None

    def prepare(self, plan: BatchPlan, shape: LaunchShape | None = None) -> Prepared:
        """Enqueue the step's plan, unless it is the one that was enqueued last.

        Args:
            shape: of a captured graph that is going to be replayed; else the smallest that holds the step.

        Raises:
            Unavailable: PLAN_RING_FULL.
            Failed: REQUEST_INVALID, the step does not fit `shape`.
            RuntimeError: a graph is being captured.
        """
        if self._tables.cells.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("open the step first and capture inside it: the plan's copy is no part of a graph")
        if self._sent is not None and self._sent[0] is plan and self._sent[1] == shape:
            self._join(self._device.compute)
            return self._sent[2]
        self._sent = None
        served, reference, reasons = self._share_out(plan)
        if shape is None and (not served or plan.rows > self._plan.most_rows):
            return _all_reference(plan, reasons, "" if not served else f"more than {self._plan.most_rows} rows")
        stream = self._device.compute
        self._join(stream)
        slot = self._ring.take()
        try:
            self._send_rows(_residents(served), slot)
            work = Work.of(served, plan.rows, self._tables.shape.stride, self._tables.blocks)
            chosen = shape or self._natural(work)
            if shape is not None and (reference or not fits(work, shape)):
                raise _no_fit(shape, reasons)
            if not self._plan.holds(chosen):
                return _all_reference(plan, reasons, "more blocks than the plan's buffers hold")
            count = fill(chosen, work, slot.numbers)
            self._plan.memory[:count].copy_(slot.plan[:count], non_blocking=True)
        finally:
            slot.sent = self._device.record(stream)
        prepared = Prepared(self._plan.view(chosen), reference, reasons)
        self._sent = plan, shape, prepared
        return prepared

    def run(self, site: Site, view: PlanView, x_ri: Tensor, y_ro: Tensor) -> None:
        """y_ro += the deltas of the kernels' rows; both contiguous and as `why_not` wants them."""
        self.launcher.run(self._linears[site.path], view, x_ri, y_ro)

    @staticmethod
    def why_not(x: Tensor, y: Tensor) -> str:
        """Why kernels cannot run behind this layer, or nothing."""
        if x.dtype not in DTYPES or y.dtype not in DTYPES:
            return f"layer of {x.dtype} and {y.dtype}"
        if torch.is_grad_enabled() and (y.requires_grad or x.requires_grad):
            return "gradients are wanted"
        return ""

    # --- parts of prepare

    def _share_out(self, plan: BatchPlan) -> tuple[list[Segment], tuple[Segment, ...], tuple[str, ...]]:
        served: list[Segment] = []
        reference: list[Segment] = []
        reasons: set[str] = set()
        for segment in plan.segments:
            if not segment.components:
                continue
            why = [reason for c in segment.components if (reason := self._verdict(c.resident))]
            reasons.update(why)
            (reference if why else served).append(segment)
        return served, tuple(reference), tuple(sorted(reasons))

    def _verdict(self, resident: ResidentLike) -> str:
        known = self._verdicts.get(resident.slot)
        if known is None or known[0] is not resident:
            known = self._verdicts[resident.slot] = resident, self._tables.why_not(resident)
        return known[1]

    def _join(self, stream: Stream) -> None:
        if self._stream is not None and stream != self._stream:
            self._device.wait(stream, self._device.record(self._stream))
        self._stream = stream

    def _send_rows(self, residents: Iterable[ResidentLike], slot: RingSlot) -> None:
        missing = [resident for resident in residents if self._tables.missing(resident)]
        for index, resident in enumerate(missing):
            staged = index < len(slot.rows)
            row = slot.rows[index] if staged else np.empty(self._tables.shape.stride, np.int64)
            self._tables.write(resident, row)
            source = slot.cells[index] if staged else torch.from_numpy(row)
            self._tables.row_of(resident.slot).copy_(source, non_blocking=staged)

    def _natural(self, work: Work) -> LaunchShape:
        if not self._batch_invariant and (
            work.rows <= FEW_ROWS or (work.rows <= SOME_ROWS and work.adapted_rows < 2 * work.groups)
        ):
            return natural_shape(work, Regime.ROWS, 1)
        return natural_shape(work, Regime.TILES, tile_rows(work.rows))


def _residents(segments: Iterable[Segment]) -> Iterable[ResidentLike]:
    return {c.resident.slot: c.resident for segment in segments for c in segment.components}.values()


def _all_reference(plan: BatchPlan, reasons: tuple[str, ...], why: str) -> Prepared:
    adapted = tuple(segment for segment in plan.segments if segment.components)
    return Prepared(None, adapted, tuple(sorted({*reasons, why} - {""})))


def _no_fit(shape: LaunchShape, reasons: tuple[str, ...]) -> Exception:
    return error(
        Code.REQUEST_INVALID, "step.shape",
        f"the step does not fit {shape}" + "".join(f"; {reason}" for reason in reasons),
        "Look for a graph by the shape of the step, and capture one if there is none.",
    )  # fmt: skip


def _forms(sites: Sequence[Site], shape: TableShape) -> Iterable[Form]:
    rows: Mapping[str, int] = {matrix.name: n for matrix, n in zip(shape.matrices, shape.rows, strict=True)}
    for site in sites:
        slices = tuple((part.offset, part.width) for part in site.slices)
        most = max(rows[part.path] for part in site.slices)
        yield Form(site.in_features, site.out_features, slices, most)
