"""Host memory that plans and table rows are sent from: three slots in turn, each with the event that frees it.

A slot may be written again once its copies have executed. The engine never waits for that (I13): a full ring
is an error, and means that the device is three steps behind the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from adapterd.gpu_cache.device import Event

SLOTS = 3
KEPT_PARTS = 256


class Parts:
    """The beginnings of a tensor: making one takes as long as copying it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._known: dict[int, torch.Tensor] = {}

    def __getitem__(self, count: int) -> torch.Tensor:
        """Its first `count` elements."""
        known = self._known.get(count)
        if known is None:
            if len(self._known) >= KEPT_PARTS:
                self._known.clear()
            with torch.inference_mode(False):
                known = self._known[count] = self._tensor[:count]
        return known


class RingSlot:
    """Pinned on CUDA.

    Attributes:
        plan: int32, as long as the plan's buffer on the device; `numbers` is the same memory in numpy.
        cells: int64 [table rows, stride]; `rows` is the same memory in numpy.
        sent: the mark behind the last copies from here.
        parts: the beginnings of `plan`.
    """

    def __init__(self, plan_size: int, table_rows: int, stride: int, *, pinned: bool) -> None:
        with torch.inference_mode(False):
            self.plan = torch.zeros(plan_size, dtype=torch.int32, device="cpu", pin_memory=pinned)
            self.cells = torch.zeros(table_rows, stride, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.numbers, self.rows = self.plan.numpy(), self.cells.numpy()
        self.sent: Event | None = None
        self.parts = Parts(self.plan)


class PlanRing:
    """`SLOTS` slots. Not thread-safe: the engine's step lock guards it."""

    def __init__(self, plan_size: int, table_rows: int, stride: int, *, pinned: bool) -> None:
        self._slots = [RingSlot(plan_size, table_rows, stride, pinned=pinned) for _ in range(SLOTS)]
        self._next = 0

    def take(self) -> RingSlot:
        """The slot that was sent longest ago; the caller sets `sent` once it has enqueued its copies.

        Raises:
            Unavailable: PLAN_RING_FULL.
        """
        slot = self._slots[self._next]
        if slot.sent is not None and not slot.sent.done():
            raise error(
                Code.PLAN_RING_FULL, "step", f"the plans of the last {SLOTS} steps have not reached the device yet",
                "Let the device finish a step before the next one begins; whoever reads the step's tokens does.",
            )  # fmt: skip
        self._next = (self._next + 1) % SLOTS
        slot.sent = None
        return slot
