"""What a step did, as a value: which rows got which versions at which weight, and what computed it (I19)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapterd.gpu_cache.engine.plan import BatchPlan, Component


@dataclass(frozen=True, slots=True)
class Applied:
    """One version applied to a run of rows.

    Attributes:
        tenant, version_digest: whose version, and which (hex).
        weight: its weight in the composition; 1.0 for a single adapter.
        slot, generation: where it stood in the cache, and which use of that slot it was.
    """

    tenant: str
    version_digest: str
    weight: float
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class SegmentReceipt:
    """Rows [row_start, row_start + rows) and what they got; nothing applied means the base alone."""

    row_start: int
    rows: int
    applied: tuple[Applied, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """One finished step.

    Attributes:
        segments: every row of the step, in order.
        kernel: what computed the deltas: `triton:rows`, `triton:tiles`, `triton:rows+tiles` where some layers ran in
            the one and some in the other, `reference:torch`, or `none` for a step of base rows alone where kernels
            are. Of a replayed graph, what it may have in it by its shape.
        fallback: whether the reference stood in for a kernel, for the whole step or for some of its rows.
        reasons: why it did, each once, sorted.
        batch_invariant: whether the step ran in batch-invariant mode (I18).
        device: of the arena, such as `cpu` or `cuda:0`.
        layer_calls: how often a wrapped layer ran in the step.
        not_run: modules that an adapter of the step adapts and that never ran in it, sorted. Expected
            where only a part of a model runs, or a captured graph is replayed; otherwise the model
            reads the weight of that module without calling it, and the adapter's rows lack its effect.
    """

    segments: tuple[SegmentReceipt, ...]
    kernel: str
    fallback: bool
    batch_invariant: bool
    device: str
    layer_calls: int
    not_run: tuple[str, ...]
    reasons: tuple[str, ...] = ()


def segment_receipts(plan: BatchPlan) -> tuple[SegmentReceipt, ...]:
    """The plan's segments without the objects behind them, so that a kept receipt pins nothing."""
    return tuple(SegmentReceipt(s.start, s.rows, tuple(map(_applied, s.components))) for s in plan.segments)


def _applied(component: Component) -> Applied:
    resident = component.resident
    return Applied(resident.key.tenant, resident.key.digest, component.weight, resident.slot, resident.generation)
