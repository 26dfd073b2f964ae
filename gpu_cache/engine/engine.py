"""The face of the engine: wraps a model's linears once, then serves steps."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic

from torch import nn

from adapterd.gpu_cache.engine.dispatch import Kernels, model_dtype, open_fast_path
from adapterd.gpu_cache.engine.layers import Site, find_sites
from adapterd.gpu_cache.engine.plan import BatchPlan, Planner, ServingCache, Ticket, each_once, split_rows
from adapterd.gpu_cache.engine.sharding.joining import Handle, join
from adapterd.gpu_cache.engine.step import CurrentStep, LayerHook, RunningStep, no_kernel
from adapterd.gpu_cache.engine.step_context import LeaseT, Step
from adapterd.gpu_cache.engine.tables import Tables
from adapterd.gpu_cache.table_shape import MAX_RANK
from adapterd.loader.base_model import BaseSpec

if TYPE_CHECKING:
    import torch

    from adapterd.gpu_cache.engine.device_plan import LaunchShape
    from adapterd.gpu_cache.engine.plan import ResidentLike
    from adapterd.gpu_cache.engine.sharding.reduced import Reduce


class LoRAEngine(Generic[LeaseT]):
    """Serves many adapters over one base model, each row with its own composition.

        y_ro = base(x)_ro + Σ weight · scaling · (x_ri Aᵀ) Bᵀ        for the rows of each composition

    Wrapping is by forward hook: the base's modules, weights and own forward stay as they are, and nothing
    is merged into them (I20). Outside a step a wrapped layer is the base's layer alone, for warm-up and
    for other work with the same model; so is a copy or pickle of the model at any time. Inside a step,
    base rows keep their bits (I18), and every wrapped layer must see exactly the step's rows (I24). Deltas
    are accumulated in IEEE fp32 (fp64 where a layer gives fp64) and rounded once, to the layer's output dtype.

    **What is wrapped.** The model must have every module of the base's table with its widths, or inside a
    fused linear that `stacked` names (`bind.check_table`). By default every linear and Conv1D is wrapped, except

    * the output head, and whatever else sees other rows than the layer stack: the model's
      `get_output_embeddings()`, modules outside its `base_model_prefix` (a classifier), and modules with a
      path part out of `table_shape.HEAD_NAMES`;
    * children of `torch.nn.MultiheadAttention`, which reads their weights without calling them;
    * a module that stands at two paths, because a call does not say which one it is for.

    `targets` says it by name instead: full module paths or their ends at a dot (`q_proj`), as adapters
    name them. An adapter with a module that is not wrapped is refused at the step: never a silent skip.
    In an encoder-decoder, encoder and decoder layers must see the same number of rows within one step.

    **Where bits change.** On kernels the same step gives the same bits. A row's bits may change with the regime
    (`device_plan.Regime`) and with the launch configuration. Steps of more than 256 rows work in tiles. Shorter ones
    work row by row; where at least a quarter of their rows share an adapter with another row, linears that are wide
    enough work in tiles, too, by the step's `shape` alone (`kernels.configs.regime_of`). The configuration goes by
    the step's number of rows, its largest rank and, where rows share, by how many tiles there are (`spread`).
    `batch_invariant` has none of these boundaries.

    **Threads.** One step at a time on an engine: a nested or concurrent one is a RuntimeError, not a wait,
    and so is a layer that runs in another thread than its step was opened in. Run the model on the stream
    that is current when the step opens. Several engines may run in several threads.

    Args:
        model: the live base model; its tensors on the cache's device.
        cache: where the adapters are; its `base` is the model's table.
        stacked: fused linear → the modules of the table it holds, in order along out_features, such as
            `{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}`; names are ends of paths.
        targets: names to wrap, or None for the rule above.
        batch_invariant: in this mode a row's delta does not depend on its neighbours, their order or their
            number, bit for bit; slower for large segments (`reference`).
        strict: refuse a step, or a layer, for which the reference would stand in for a kernel (I19). Without it
            it does, and receipts say so.
        kernels: `auto` is `triton` on CUDA cards that can run it and the `reference` elsewhere; `triton` on the
            CPU needs Triton's interpreter. Kernels read adapters of one dtype, the cache's, or if that is `auto`
            the model's own; the reference serves the others, fp64 layers and steps that want gradients.
        max_rank: of a module, that the kernels' tables have room for; the reference serves what has more.
        pdl: programmatic dependent launch: the second kernel of a linear starts early, with the same bits. None is
            wherever the card has it (sm_90 and later).
        tuning: a file of launch configurations for the kernels (`adapterctl bench kernels --tune`); None is the one
            that is shipped for the card, and a rule where there is none. It is not read where no kernels run.
        reduced: row-parallel linears whose own forward ends with the reduction over the ranks → what sums a tensor
            over them in place, such as `{"o_proj": torch.distributed.all_reduce}`; names are ends of paths. The
            engine then sums its own intermediate, by the reference, and receipts say so (`docs/tensor_parallel.md`).

    Raises:
        Failed: BASE_TABLE_INVALID; SETTINGS_INVALID of `tuning`. NotFound: PATH_NOT_FOUND of it. Refused:
            SHAPE_MISMATCH. ValueError: names that fit nothing, or kernels that cannot run here.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: ServingCache[LeaseT],
        stacked: Mapping[str, Sequence[str]] | None = None,
        targets: Iterable[str] | None = None,
        *,
        batch_invariant: bool = False,
        strict: bool = False,
        kernels: Kernels = "auto",
        max_rank: int = MAX_RANK,
        pdl: bool | None = None,
        tuning: Path | None = None,
        reduced: Mapping[str, Reduce] | None = None,
    ) -> None:
        self.cache = cache
        self.batch_invariant = batch_invariant
        self.strict = strict
        self._stacked = {name: tuple(parts) for name, parts in (stacked or {}).items()}
        self._targets = None if targets is None else tuple(targets)
        self.kernels: Kernels = kernels
        self._max_rank, self._pdl, self._tuning = max_rank, pdl, tuning
        self._lock = threading.Lock()
        self._current = CurrentStep()
        self._planner = Planner()
        self._handles: list[Handle] = []
        self._reduced = dict(reduced or {})
        self._wrap(model, self._sites(model, cache.base))

    def _sites(self, model: nn.Module, base: BaseSpec) -> tuple[Site, ...]:
        return find_sites(model, base, self._stacked, self._targets, self.cache.config.sharding, self._reduced)

    def _wrap(self, model: nn.Module, sites: tuple[Site, ...]) -> None:
        self.served = frozenset(part.path for site in sites for part in site.slices)
        self._tables = Tables(self.served)
        self._fast, self._why_reference = open_fast_path(
            self.kernels, model, self.cache, sites, self._tables.of,
            max_rank=self._max_rank, batch_invariant=self.batch_invariant, pdl=self._pdl,
            tuning=self._tuning,
        )  # fmt: skip
        self._dtype = model_dtype(model)
        self._handles = [join(site, LayerHook(site, self._current)) for site in sites]

    def step(self, rows: Iterable[tuple[LeaseT, int]], *, shape: LaunchShape | None = None) -> Step[LeaseT]:
        """A context manager in which the model runs once (or in parts) with these rows.

        Args:
            rows: (lease or None for the base, number of rows) in the order of the flattened leading
                dimensions of the layers' inputs; for input_ids [batch, time], a sequence has `time` rows.
            shape: that of the captured graph to be replayed; by default the smallest that holds the step.

        **Graphs.** Run the model once in a step, then capture it inside a step, and keep the graph under the
        step's `shape`. Inside a later step of the same shape replay it: its rows, adapters and ranks are
        that step's (I22). The receipt of such a step says that no layer ran.

        Raises:
            Failed: on entry, REQUEST_INVALID (no entry, or one without rows, or it does not fit `shape`),
                MODULE_NOT_SERVED, LEASE_NOT_READY, LEASE_RELEASED, SLOT_STALE; from a layer, ROWS_MISMATCH;
                from both, KERNEL_UNAVAILABLE. Unavailable: PLAN_RING_FULL, the device is three steps behind.
            RuntimeError: on entry, if a step is open on this engine, the engine is closed, or a graph is
                being captured.
        """
        return Step(self, tuple(rows), shape)

    def warm_up(self, rows: Iterable[int], dtypes: Iterable[torch.dtype] = ()) -> None:
        """Compile, ahead of serving, all kernels that steps of these numbers of rows can need: none of them waits then.

        It takes seconds for each number of rows where Triton's cache on disk is empty. Compositions of several
        adapters may have more rank than any single one has room for; their first step compiles what they need.

        Args:
            rows: of the steps to come, such as the buckets of captured graphs.
            dtypes: of the layers' inputs and outputs; the model's own if none is given.

        Raises:
            ValueError: a number of rows that no step has.
            RuntimeError: a step is open on this engine, or the engine is closed.
        """
        counts = sorted(set(rows))
        if counts and counts[0] < 1:
            raise ValueError(f"{counts[0]} is not a number of rows")
        self._acquire()
        try:
            if self._fast is not None:
                self._fast.warm_up(counts, tuple(dtypes) or (self._dtype,))
        finally:
            self._lock.release()

    @property
    def table_bytes(self) -> int:
        """Device memory that the kernels hold beside the arena, for tables and plans; 0 for the reference."""
        return 0 if self._fast is None else self._fast.nbytes

    def check(self, lease: LeaseT) -> None:
        """Whether a step would take this lease, before there are rows for it. Nothing is planned or sent for that.

        Raises:
            Failed: MODULE_NOT_SERVED, LEASE_NOT_READY, LEASE_RELEASED, SLOT_STALE, KERNEL_UNAVAILABLE.
            RuntimeError: a step is open on this engine, or the engine is closed.
        """
        self._acquire()
        try:
            ticket = self.cache.begin_step((lease,))
            try:
                self._judge([] if lease is None else [resident for resident, _ in lease.composition])
            finally:
                ticket.end()
        finally:
            self._lock.release()

    def _judge(self, residents: Sequence[ResidentLike]) -> None:
        reasons = [self._why_reference] if residents and self._why_reference else []
        for resident in residents:
            self._tables.of(resident)  # raises what is not served
        if self._fast is not None:
            reasons += self._fast.judge(residents)
        if self.strict and reasons:
            raise no_kernel("step", reasons[0])

    def rebind(self, model: nn.Module, base: BaseSpec) -> None:
        """A base reload: serve `model`, whose table is `base`, with the same `stacked` and `targets`.

        Nothing changes if it raises. The cache forgets every resident of the old base before the new
        model is wrapped, so that no forward of the new one can meet them (I16).

        Raises:
            As the constructor; RuntimeError if a step is open on this engine, or the engine is closed.
        """
        self._acquire()
        try:
            sites = self._sites(model, base)
            self.cache.rebind(base)
            self._unwrap()
            self._wrap(model, sites)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Take the hooks off; the model is what it was. Idempotent. RuntimeError if a step is open."""
        if not self._handles:
            return
        self._acquire()
        try:
            self._unwrap()
        finally:
            self._lock.release()

    def _unwrap(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._planner = Planner()

    def _acquire(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("a step is open on this engine; one engine runs one step at a time")
        if not self._handles:
            self._lock.release()
            raise RuntimeError("the engine is closed")

    def _begin(
        self, rows: tuple[tuple[LeaseT, int], ...], shape: LaunchShape | None
    ) -> tuple[Ticket, RunningStep, LaunchShape | None]:
        self._acquire()
        try:
            leases, lengths = split_rows(rows)
            ticket = self.cache.begin_step(each_once(leases))
            try:
                running, shape = self._running(self._planner.plan(leases, lengths), shape)
            except BaseException:
                ticket.end()
                raise
        except BaseException:
            self._lock.release()
            raise
        self._current.running = running
        return ticket, running, shape

    def _running(self, plan: BatchPlan, shape: LaunchShape | None) -> tuple[RunningStep, LaunchShape | None]:
        fast, prepared = self._fast, None
        if fast is not None:
            prepared = fast.prepare(plan, shape)
        else:
            for resident in plan.residents():
                self._tables.of(resident)  # raises what is not served
        running = RunningStep(
            plan, self._tables, self.cache.arena,
            batch_invariant=self.batch_invariant, strict=self.strict, why_reference=self._why_reference,
            fast=(fast, prepared) if fast is not None and prepared is not None else None,
        )  # fmt: skip
        if prepared is None or prepared.view is None or prepared.reference:
            return running, None
        return running, prepared.view.shape

    def _end(self, ticket: Ticket) -> None:
        self._current.running = None
        try:
            ticket.end()
        finally:
            self._lock.release()

    def __enter__(self) -> LoRAEngine[LeaseT]:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
