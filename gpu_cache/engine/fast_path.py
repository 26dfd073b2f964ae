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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adapterd.gpu_cache.engine.device_plan import DevicePlan, LaunchShape, PlanView, Regime
from adapterd.gpu_cache.engine.device_tables import DeviceTables
from adapterd.gpu_cache.engine.kernels.configs import regime_of, tile_rows
from adapterd.gpu_cache.engine.kernels.forms import Form, Linear, linear_of
from adapterd.gpu_cache.engine.kernels.grids import DTYPES, key_of
from adapterd.gpu_cache.engine.kernels.launch import Launcher
from adapterd.gpu_cache.engine.lists import SOME_ROWS, Work, fill, fits, shape_of, tile_groups
from adapterd.gpu_cache.engine.plan_ring import Parts, PlanRing, RingSlot
from adapterd.gpu_cache.engine.shares import REFERENCE, Shares, StepShares
from adapterd.gpu_cache.engine.tables import TORCH_DTYPE
from adapterd.gpu_cache.table_shape import MOST_ROWS, Matrix, TableShape
from adapterd.loader.errors import Code, error
from adapterd.loader.layout import Dtype

if TYPE_CHECKING:
    from adapterd.gpu_cache.device import Stream
    from adapterd.gpu_cache.engine.layers import Site
    from adapterd.gpu_cache.engine.plan import BatchPlan, ResidentLike, Segment, ServingCache

STAGED_ROWS = 64
"""Table rows of a step that go through pinned memory; more of them are copied at once, which takes longer."""


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
        check: raises for a resident that the engine does not serve; asked once for each.
        max_rank: of one module of one adapter that the tables have room for.
        batch_invariant: rows are always worked on in tiles, with fixed parts of K.
        pdl: programmatic dependent launch, for sm_90 and later.
        tuning: a file of launch configurations; None is the one that is shipped for the card.
    """

    def __init__(
        self,
        cache: ServingCache[Any],
        sites: Sequence[Site],
        dtype: Dtype,
        check: Callable[[ResidentLike], object],
        *,
        max_rank: int,
        batch_invariant: bool = False,
        pdl: bool = False,
        tuning: Path | None = None,
    ) -> None:
        arena, config = cache.arena, cache.config
        matrices = [Matrix(s.path, site.in_features, s.width) for site in sites for s in site.slices]
        shape = TableShape(matrices, config.max_residents, max_rank, dtype, config.page_bytes)
        self._tables = DeviceTables(shape, arena.device)
        self._plan = DevicePlan(MOST_ROWS, arena.device)
        self._sent_to = Parts(self._plan.memory)
        staged = min(STAGED_ROWS, config.max_residents)
        self._ring = PlanRing(self._plan.size, staged, shape.stride, pinned=arena.device.type == "cuda")
        self._device = cache.device
        self._stream: Stream | None = None
        self._batch_invariant = batch_invariant
        self._linears: dict[str, Linear] = {}
        forms = {site.path: form for site, form in zip(sites, _forms(sites, shape), strict=True)}
        self._forms = tuple(dict.fromkeys(forms.values()))
        self.launcher = Launcher(
            self._forms, arena, TORCH_DTYPE[dtype], shape.entries, batch_invariant=batch_invariant, pdl=pdl,
            tuning=tuning,
        )  # fmt: skip
        first = 0
        for site in sites:
            self._linears[site.path] = linear_of(forms[site.path], self._tables, first)
            first += len(site.slices)
        self._shares = Shares(self._tables, check)
        self._wanted: dict[tuple[LaunchShape, int], bool] = {}
        self._sent: tuple[BatchPlan, LaunchShape | None, Prepared] | None = None

    def prepare(self, plan: BatchPlan, shape: LaunchShape | None = None) -> Prepared:
        """Enqueue the step's plan, unless it is the one that was enqueued last.

        Args:
            shape: of a captured graph that is going to be replayed; else the smallest that holds the step.

        Raises:
            As `check`. Unavailable: PLAN_RING_FULL.
            Failed: REQUEST_INVALID, the step does not fit `shape`.
            RuntimeError: a graph is being captured.
        """
        if self._tables.cells.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("open the step first and capture inside it: the plan's copy is no part of a graph")
        if self._sent is not None and self._sent[0] is plan and self._sent[1] == shape:
            self._join(self._device.compute)
            return self._sent[2]
        self._sent = None
        shares = self._shares.of_plan(plan)
        reference, reasons = self._for_reference(plan) if REFERENCE in shares.distinct else ((), ())
        served = shares.groups > 0
        if shape is None and (not served or plan.rows > self._plan.most_rows):
            return _all_reference(plan, reasons, "" if not served else f"more than {self._plan.most_rows} rows")
        if shape is not None and reference:
            raise _no_fit(shape, reasons)
        prepared = self._send(plan, shares, shape, reference, reasons)
        self._sent = plan, shape, prepared
        return prepared

    def judge(self, residents: Sequence[ResidentLike]) -> list[str]:
        """Why kernels cannot serve these: nothing, if they can. Enqueues nothing. Raises as `check`."""
        return self._shares.why_not(residents)

    def run(self, site: Site, view: PlanView, x_ri: Tensor, y_ro: Tensor) -> Regime:
        """y_ro += the deltas of the kernels' rows; both contiguous and as `why_not` wants them. How it was done."""
        return self.launcher.run(self._linears[site.path], view, x_ri, y_ro)

    def linear(self, site: Site) -> Linear:
        """What `run` hands to the launcher, for who times its kernels."""
        return self._linears[site.path]

    @property
    def nbytes(self) -> int:
        """On the device: the tables and the plan's buffer. Scratch, some planes of fp32 a row, comes on top."""
        return self._tables.nbytes + self._plan.memory.nbytes

    def warm_up(self, rows: Iterable[int], dtypes: Iterable[torch.dtype]) -> None:
        """Compile and load what steps of these numbers of rows can need, single adapters of any rank in them.

        It runs every such kernel once on an empty plan: what is in the tables, and layers, stay as they are.

        Args:
            dtypes: of layers, in and out; those that are the reference's need nothing.
        """
        self._sent = None
        self._join(self._device.compute)
        self._plan.memory.zero_()
        views = [view for count in rows for shape in self._shapes(count) if (view := self._plan.view(shape))]
        pairs = [(dtype, dtype) for dtype in dtypes if dtype in DTYPES]
        self.launcher.warm_up(self._linears.values(), views, pairs)

    def _shapes(self, rows: int) -> Iterator[LaunchShape]:
        """Of either regime that a step of so many rows may be in, for every number of blocks."""
        blocks = 1
        while blocks <= self._tables.shape.entries:
            if rows <= SOME_ROWS and not self._batch_invariant:
                for mean in {blocks, max(1, blocks // 2)}:
                    yield LaunchShape(Regime.ROWS, rows, 1, rows, mean * rows, blocks)
            size = tile_rows(rows)
            for groups in tile_groups(rows):
                yield LaunchShape(Regime.TILES, rows, size, -(-rows // size), 16, blocks, None, groups)
            blocks *= 2

    @staticmethod
    def why_not(x: Tensor, y: Tensor) -> str:
        """Why kernels cannot run behind this layer, or nothing."""
        if x.dtype not in DTYPES or y.dtype not in DTYPES:
            return f"layer of {x.dtype} and {y.dtype}"
        if torch.is_grad_enabled() and (y.requires_grad or x.requires_grad):
            return "gradients are wanted"
        return ""

    # --- parts of prepare

    def _for_reference(self, plan: BatchPlan) -> tuple[tuple[Segment, ...], tuple[str, ...]]:
        """The segments that kernels cannot serve, and why."""
        why = [self._shares.why_not([c.resident for c in segment.components]) for segment in plan.segments]
        segments = tuple([segment for segment, reasons in zip(plan.segments, why, strict=True) if reasons])
        return segments, tuple(sorted({reason for reasons in why for reason in reasons}))

    def _send(
        self,
        plan: BatchPlan,
        shares: StepShares,
        shape: LaunchShape | None,
        reference: tuple[Segment, ...],
        reasons: tuple[str, ...],
    ) -> Prepared:
        mixed = self._shares.mixed(shares)  # before their entries are taken
        work = Work(shares, plan.lengths, plan.rows, self._shares.entries, mixed)
        chosen = shape or shape_of(work, self._want_tiles, batch_invariant=self._batch_invariant)
        if shape is not None and not fits(work, shape):
            raise _no_fit(shape, reasons)
        view = self._plan.view(chosen)
        if view is None:
            return _all_reference(plan, reasons, "more blocks than the plan's buffers hold")
        stream = self._device.compute
        self._join(stream)
        slot = self._ring.take()
        try:
            self._send_rows(slot)
            count = fill(view.shape, work, slot.numbers)
            self._sent_to[count].copy_(slot.parts[count], non_blocking=True)
        finally:
            slot.sent = self._device.record(stream)
        return Prepared(view, reference, reasons)

    def _want_tiles(self, shape: LaunchShape, groups: int) -> bool:
        """Asked in every step in which rows share adapters."""
        known = self._wanted.get((shape, groups))
        if known is None:
            if len(self._wanted) > 4096:  # steps of ever new sizes
                self._wanted.clear()
            known = any(regime_of(key_of(form, shape), groups) is Regime.TILES for form in self._forms)
            self._wanted[shape, groups] = known
        return known

    def _join(self, stream: Stream) -> None:
        """Whatever the former stream reads is read before this one overwrites it."""
        if self._stream is not None and stream != self._stream:
            self._device.wait(stream, self._device.record(self._stream))
        self._stream = stream

    def _send_rows(self, slot: RingSlot) -> None:
        """The rows of residents that are new in their slots."""
        unsent = self._shares.unsent
        for index, resident in enumerate(list(unsent.values())):
            staged = index < len(slot.rows)
            row = slot.rows[index] if staged else np.empty(self._tables.shape.stride, np.int64)
            self._tables.write(resident, row)
            source = slot.cells[index] if staged else torch.from_numpy(row)
            self._tables.row_of(resident.slot).copy_(source, non_blocking=staged)
            self._tables.written(resident)
            del unsent[resident.slot]


def _all_reference(plan: BatchPlan, reasons: tuple[str, ...], why: str) -> Prepared:
    adapted = tuple([segment for segment in plan.segments if segment.components])
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
