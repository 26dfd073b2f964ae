"""The context manager of one step, as `LoRAEngine.step` gives it out."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from adapterd.gpu_cache.engine.plan import LeaseLike

if TYPE_CHECKING:
    from adapterd.gpu_cache.engine.device_plan import LaunchShape
    from adapterd.gpu_cache.engine.engine import LoRAEngine
    from adapterd.gpu_cache.engine.plan import Ticket
    from adapterd.gpu_cache.engine.receipt import Receipt
    from adapterd.gpu_cache.engine.step import RunningStep

LeaseT = TypeVar("LeaseT", bound=LeaseLike | None)


class Step(Generic[LeaseT]):
    """From `LoRAEngine.step`; enters once."""

    def __init__(
        self, engine: LoRAEngine[LeaseT], rows: tuple[tuple[LeaseT, int], ...], shape: LaunchShape | None
    ) -> None:
        self._engine = engine
        self._rows = rows
        self._shape = shape
        self._begun: tuple[Ticket, RunningStep] | None = None
        self._over = False
        self._done: RunningStep | None = None
        self._receipt: Receipt | None = None

    @property
    def receipt(self) -> Receipt:
        """What ran. RuntimeError before the step has ended, and for a step that ended in an exception."""
        if self._receipt is None:
            if self._done is None:
                raise RuntimeError("the receipt is there once the step has ended without an exception")
            self._receipt = self._done.receipt()
            self._done = None
        return self._receipt

    @property
    def shape(self) -> LaunchShape | None:
        """Once it has begun: what a graph captured in this step depends on, or None if none can be captured.

        None, too, for a step of base rows alone. Such a step, and any that fits, can be given a graph's `shape`.
        """
        return self._shape

    def __enter__(self) -> Step[LeaseT]:
        if self._begun is not None:
            raise RuntimeError("a step is entered once; ask the engine for another one")
        ticket, running, self._shape = self._engine._begin(self._rows, self._shape)
        self._begun = ticket, running
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._begun is None or self._over:
            raise RuntimeError("the step is not open: it was never entered, or it has ended")
        self._over = True
        ticket, running = self._begun
        self._engine._end(ticket)
        if kind is None:
            self._done = running  # few receipts are read, and one takes longer to make than a plan
