"""Questions to the host, and how its answers come back under the cache's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition
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
            self._answer(ask, then, self._adopted(outcome))

        ask.number = self._host.fetch(wanted, record.tenant, settle, priority=record.priority)
        return ask

    def at_hand(self, wanted: Sequence[Ref] | Sequence[Resolved], tenant: str) -> tuple[Ask, AtHand] | None:
        """What the host has of it without asking anybody, and the request that holds it; None if not all of it."""
        here = self._host.at_hand(wanted, tenant)
        if here is None:
            return None
        ask = Ask(here.request, answered=True)
        if all(self._slabs.knows(image.slab) for image in here.images):
            return ask, here
        self.let_go(ask)  # adopting a slab takes its time: the long way does it where that may be
        return None

    def let_go(self, ask: Ask | None) -> None:
        """What the request holds, or was going to. Idempotent."""
        if ask is not None:
            self._host.release(ask.number)

    def _answer(self, ask: Ask, then: Then[T], outcome: T | Failure) -> None:
        """In a thread of the host's."""
        with self._lock:
            ask.answered = True
            then(ask, outcome)
            self._after()

    def _adopted(self, outcome: Images | Failure) -> Images | Failure:
        """Without the lock: a slab that is new to the device takes its time."""
        if isinstance(outcome, Failure):
            return outcome
        try:
            for image in outcome:
                self._slabs.adopt(image.slab)
        except AdapterdError as failure:
            return Failure(failure.problems)
        return outcome
