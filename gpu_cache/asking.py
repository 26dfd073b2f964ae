"""Questions to the host, and how its answers come back under the cache's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Condition, Thread
from typing import TYPE_CHECKING, TypeVar

from adapterd.gpu_cache.host.interface import AtHand, Facts, Failure, Host, Image
from adapterd.gpu_cache.records import Ask, LeaseRecord
from adapterd.gpu_cache.slabs import SlabTensors
from adapterd.loader.errors import AdapterdError

if TYPE_CHECKING:
    from adapterd.loader.identity import Ref
    from adapterd.loader.sources import Resolved

T = TypeVar("T")

Images = tuple[Image, ...]
Then = Callable[[Ask, T | Failure], None]
"""What becomes of an answer, with the lock held. It must look whether the question still stands."""


class Desk:
    """Puts requests. Methods need the cache's lock.

    Args:
        lock: the cache's.
        after: called after each answer, with the lock held.
    """

    def __init__(self, host: Host, slabs: SlabTensors, lock: Condition, after: Callable[[], None]) -> None:
        self._host, self._slabs, self._lock, self._after = host, slabs, lock, after

    @property
    def trust_changes(self) -> int:
        return self._host.trust_changes

    def resolve(self, refs: Sequence[Ref], tenant: str, then: Then[tuple[Resolved, ...]]) -> Ask:
        ask = Ask()
        ask.number = self._host.resolve(refs, tenant, partial(self._answer, ask, then))
        return ask

    def verify(self, resolved: Resolved, tenant: str, then: Then[Facts]) -> Ask:
        ask = Ask()
        ask.number = self._host.verify(resolved, tenant, partial(self._answer, ask, then))
        return ask

    def fetch(self, wanted: Sequence[Resolved], record: LeaseRecord, then: Then[Images]) -> Ask:
        """For the sake of the lease. The tensors of the images' slabs are there when the answer is."""
        ask = Ask()

        def settle(outcome: Images | Failure) -> None:
            if isinstance(outcome, Failure) or self.readable(outcome):
                self._answer(ask, then, outcome)
            else:  # who tells us may be a step, which has no seconds for it
                adopting = partial(self._adopt_first, ask, then, outcome)
                try:
                    Thread(target=adopting, name="adapterd-adopt", daemon=True).start()
                except RuntimeError:  # the system gives no thread
                    adopting()

        ask.number = self._host.fetch(wanted, record.tenant, settle, priority=record.priority)
        return ask

    def at_hand(self, wanted: Sequence[Ref] | Sequence[Resolved], tenant: str) -> tuple[Ask, AtHand] | None:
        """What the host has of it without asking anybody, and the request that holds it; None if not all of it."""
        here = self._host.at_hand(wanted, tenant)
        if here is None:
            return None
        ask = Ask(here.request, answered=True)
        if self.readable(here.images):
            return ask, here
        self.let_go(ask)  # adopting a slab takes its time: the long way does it where that may be
        return None

    def readable(self, images: Iterable[Image]) -> bool:
        """Whether copies can be made of them. May be asked without the lock."""
        return all(self._slabs.knows(image.slab) for image in images)

    def let_go(self, ask: Ask | None) -> None:
        """What the request holds, or was going to. Idempotent."""
        if ask is not None:
            self._host.release(ask.number)

    def _answer(self, ask: Ask, then: Then[T], outcome: T | Failure) -> None:
        """In any thread that does not hold the lock. What an interrupt had said twice is heard once."""
        with self._lock:
            if ask.answered:
                return
            ask.answered = True
            then(ask, outcome)
            self._after()

    def _adopt_first(self, ask: Ask, then: Then[Images], images: Images) -> None:
        """Without the lock: a slab that is new to the device takes its time."""
        outcome: Images | Failure = images
        try:
            for image in images:
                self._slabs.adopt(image.slab, self._lock)
        except AdapterdError as failure:
            outcome = Failure(failure.problems)
        self._answer(ask, then, outcome)
