"""An engine that is small enough to count by hand: adapters of tenant acme, and requests for them."""

from __future__ import annotations

from adapterd.gpu_cache.step_budget import StepLimits

from .engine_loop import FakeEngine, FakeRequest

LIMITS = StepLimits(kv_blocks=8, rows=16, adapter_bytes=40, load_slots=2, load_bytes=20, page_bytes=10)


def engine(patience: int = 3, load_steps: int = 2, limits: StepLimits = LIMITS, **sizes: int) -> FakeEngine:
    return FakeEngine(limits, {("acme", name): size for name, size in sizes.items()}, patience, load_steps)


def row(name: str, *adapters: str, **how: object) -> FakeRequest:
    return FakeRequest(name, adapters=adapters, **how)  # type: ignore[arg-type]
