"""One step: a plan in force, the layers that ran under it, and its receipt."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adapterd.gpu_cache.engine.receipt import Receipt, segment_receipts
from adapterd.gpu_cache.engine.reference import KERNEL, Term, accumulate_dtype, delta
from adapterd.gpu_cache.engine.sharding.reduced import REASON, Part, Reduce, add_reduced
from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from adapterd.gpu_cache.engine.fast_path import FastPath, Prepared
    from adapterd.gpu_cache.engine.layers import Site, Slice
    from adapterd.gpu_cache.engine.plan import BatchPlan, Segment
    from adapterd.gpu_cache.engine.tables import Tables

ACTIVATIONS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class RunningStep:
    """A plan while the model runs. Only the thread that opened the step may run layers under it.

    The thread is checked because the fence of the step is recorded on that thread's compute stream:
    a layer launched elsewhere could still be reading pages that are already given away (I13).

    Args:
        plan: what each row gets.
        tables: where the residents' blocks are.
        arena: the pages.
        batch_invariant: see `reference`.
        strict: refuse what would need the reference to stand in for a kernel (I19).
        fast: the kernels, and the step as they have prepared it; without them the reference does it all.
        why_reference: why there are none though they are wanted, or nothing.

    Raises:
        Failed: KERNEL_UNAVAILABLE (I19).
    """

    def __init__(
        self,
        plan: BatchPlan,
        tables: Tables,
        arena: Tensor,
        *,
        batch_invariant: bool,
        strict: bool = False,
        fast: tuple[FastPath, Prepared] | None = None,
        why_reference: str = "",
    ) -> None:
        self._plan, self._adapted = plan, plan.adapted
        self._tables = tables
        self._arena = arena
        self._batch_invariant = batch_invariant
        self._strict, self._fast = strict, fast
        self._view = fast[1].view if fast and not fast[1].reference else None  # all rows are the kernels'
        self._reasons: set[str] = set()
        if self._adapted and why_reference:
            self._stand_in("step", why_reference)
        for reason in fast[1].reasons if fast else ():
            self._stand_in("step", reason)
        self._thread = threading.get_ident()
        self._ran: list[Site] = []
        self._regimes: set[str] = set()

    def apply(self, site: Site, x: Tensor, y: Tensor) -> Tensor:
        """The output of `site` for input `x` and base output `y`: y itself, adapted rows changed in place.

        Rows of the base are not touched, so they keep their bits (I18).

        Raises:
            Failed: ROWS_MISMATCH naming the module (I24). Refused: SHAPE_MISMATCH; DTYPE_UNSUPPORTED.
            Unavailable: DEVICE_ERROR if the layer runs on another device than the adapters.
            RuntimeError: called from another thread than the one that opened the step.
        """
        if self._view is not None and self._fast is not None and self._plain(site, x, y, self._fast[0]):
            self._ran.append(site)
            self._regimes.add(self._fast[0].run(site, self._view, x, y))
            return y
        self._check(site, x, y)
        self._ran.append(site)
        y_ro = y.reshape(-1, site.out_features)
        x_ri = x.reshape(-1, site.in_features)
        segments: tuple[Segment, ...] = ()
        if site.reduce is not None:
            self._add_reduced(site, site.reduce, x_ri, y_ro)
        elif self._fast is not None and (self._adapted or self._fast[1].view is not None):
            segments = self._run_kernels(site, x_ri, y_ro := y_ro.contiguous(), *self._fast)
        elif self._adapted:
            _refuse_capture(site, y)
            segments = self._plan.segments
        for part in site.slices:
            for segment in segments:
                self._add(segment, part, x_ri, y_ro)
        return y_ro.view(y.shape)

    def _plain(self, site: Site, x: Tensor, y: Tensor, fast: FastPath) -> bool:
        """Whether kernels take this layer's tensors as they are: asked of each layer, so without making anything."""
        rows, device = self._plan.rows, self._arena.device
        return (
            threading.get_ident() == self._thread
            and site.reduce is None
            and x.numel() == rows * site.in_features
            and x.shape[-1] == site.in_features
            and y.numel() == rows * site.out_features
            and y.shape[-1] == site.out_features
            and x.device == device
            and y.device == device
            and x.is_contiguous()
            and y.is_contiguous()
            and not fast.why_not(x, y)
        )

    def _run_kernels(
        self, site: Site, x_ri: Tensor, y_ro: Tensor, fast: FastPath, prepared: Prepared
    ) -> tuple[Segment, ...]:
        """The segments that remain for the reference."""
        why = fast.why_not(x_ri, y_ro)
        remain = self._plan.segments if why else prepared.reference
        if remain:
            _refuse_capture(site, y_ro)
        if why:
            self._stand_in(site.path, why)
        elif prepared.view is not None:
            self._regimes.add(fast.run(site, prepared.view, x_ri.contiguous(), y_ro))
        return remain

    def _stand_in(self, where: str, reason: str) -> None:
        if self._strict:
            raise no_kernel(where, reason)
        self._reasons.add(reason)

    def _add(self, segment: Segment, part: Slice, x_ri: Tensor, y_ro: Tensor) -> None:
        terms = self._terms(segment, part)
        if not terms:
            return
        rows, columns = slice(segment.start, segment.stop), slice(part.offset, part.offset + part.width)
        dtype = accumulate_dtype(y_ro.dtype)
        # One addition in the accumulation dtype and one rounding to the layer's output dtype.
        y_ro[rows, columns] += delta(x_ri[rows], terms, dtype=dtype, batch_invariant=self._batch_invariant)

    def _add_reduced(self, site: Site, reduce: Reduce, x_ri: Tensor, y_ro: Tensor) -> None:
        """The layer's output is summed over the ranks already, its input is this rank's part."""
        if not self._adapted:
            return
        _refuse_capture(site, y_ro)
        self._stand_in(site.path, REASON)
        every = (
            Part(
                slice(segment.start, segment.stop),
                slice(part.offset, part.offset + part.width),
                self._terms(segment, part),
            )
            for part in site.slices
            for segment in self._plan.segments
        )
        parts = [part for part in every if part.terms]
        add_reduced(parts, reduce, x_ri, y_ro, batch_invariant=self._batch_invariant)

    def _terms(self, segment: Segment, part: Slice) -> list[Term]:
        found = (self._tables.of(c.resident).term(part.path, c.weight, self._arena) for c in segment.components)
        return [term for term in found if term is not None]

    def _check(self, site: Site, x: Tensor, y: Tensor) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"{site.path} runs in another thread than the one that opened the step")
        for what, tensor, width in (("input", x, site.in_features), ("output", y, site.out_features)):
            rows = tensor.shape[:-1].numel()
            if rows != self._plan.rows:
                raise error(
                    Code.ROWS_MISMATCH, site.path,
                    f"the step has {self._plan.rows} rows, the {what} {tuple(tensor.shape)} has {rows}",
                    "Count padding and every sequence; leave modules that see other rows out of `targets`.",
                )  # fmt: skip
            if tensor.shape[-1] != width:
                raise error(
                    Code.SHAPE_MISMATCH, site.path, f"the {what} {tuple(tensor.shape)} is not {width} wide",
                    "The live module has other widths than it says; leave it out of `targets`.",
                )  # fmt: skip
            if self._adapted and tensor.dtype not in ACTIVATIONS:
                raise error(
                    Code.DTYPE_UNSUPPORTED, site.path,
                    f"the layer's {what} is {tensor.dtype}: codes whose scale is not here",
                    "Quantise activations inside of the layer, or leave it out of `targets`.",
                )  # fmt: skip
            if self._adapted and tensor.device != self._arena.device:
                raise error(
                    Code.DEVICE_ERROR, site.path,
                    f"the layer's {what} is on {tensor.device}, the adapters are on {self._arena.device}",
                    "Make the cache on the model's device; a model over several devices needs sharding.",
                )  # fmt: skip

    @property
    def _kernel(self) -> str:
        if self._fast is None:
            return KERNEL
        prepared = self._fast[1]
        if prepared.view is not None:
            return f"triton:{'+'.join(sorted(self._regimes)) or prepared.view.shape.regimes}"
        return KERNEL if prepared.reference else "none"

    def _not_run(self) -> frozenset[str]:
        ran = {part.path for site in self._ran for part in site.slices}
        paths = {self._tables.of(resident).paths for resident in self._plan.residents()}
        return frozenset().union(*paths) - ran

    def receipt(self) -> Receipt:
        """What has run so far."""
        return Receipt(
            segments=segment_receipts(self._plan),
            kernel=self._kernel,
            fallback=bool(self._reasons),
            batch_invariant=self._batch_invariant,
            device=str(self._arena.device),
            layer_calls=len(self._ran),
            not_run=tuple(sorted(self._not_run())),
            reasons=tuple(sorted(self._reasons)),
        )


def no_kernel(where: str, reason: str) -> Exception:
    """What a strict engine refuses (I19)."""
    return error(
        Code.KERNEL_UNAVAILABLE, where, f"the reference would stand in for a kernel: {reason}",
        "Leave such rows to an engine that is not strict, or take the cause away.",
    )  # fmt: skip


def _refuse_capture(site: Site, y: Tensor) -> None:
    """A graph would repeat the reference's rows and pages of this very step, whatever the next one has."""
    if y.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{site.path}: what the reference does cannot be captured in a graph")


class CurrentStep:
    """Which step is in force on an engine's layers: none, or one.

    Hooks are copied and pickled with the model they are on. The copy's are in no step, now or later: it is
    the base alone, and does not carry the arena with it.
    """

    def __init__(self) -> None:
        self.running: RunningStep | None = None

    def __reduce__(self) -> tuple[type[CurrentStep], tuple[()]]:
        return CurrentStep, ()


class LayerHook:
    """The forward hook of one site: nothing outside a step, the step's delta inside.

    Args:
        site: the layer it stands behind.
        current: shared with the engine.
    """

    def __init__(self, site: Site, current: CurrentStep) -> None:
        self._site = site
        self._current = current

    def __call__(self, module: object, args: Sequence[Any], kwargs: dict[str, Any], output: object) -> Tensor | None:
        running = self._current.running
        if running is None:
            return None
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if x is None or not isinstance(output, Tensor) or not output.is_floating_point():
            raise error(
                Code.MODULE_NOT_SERVED, self._site.path,
                "only modules that turn one tensor into one floating tensor can be served",
                "Leave this module out of `targets`.",
            )  # fmt: skip
        return running.apply(self._site, x, output)
