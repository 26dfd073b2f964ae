"""A host whose answers can be held back: whoever asked may have changed its mind by the time they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import Facts, Failure, Image, Settle
from adapterd.gpu_cache.host.loading import Serving
from adapterd.loader.identity import Ref
from adapterd.loader.sources import Resolved

T = TypeVar("T")


class LateHost(HostCache):
    """`HostCache`, but while `late` an answer stays on its way until `arrive`, and a release does not overtake it: as
    when it was given just before, by a thread that has not got the lock of who asked yet.

    `asked` are the requests by number, `released` the numbers of those that were released.
    """

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.late = False
        self.asked: dict[int, str] = {}
        self.released: list[int] = []
        self._on_their_way: deque[Callable[[], None]] = deque()

    def resolve(
        self, asked: Sequence[Ref], tenant: str, settle: Settle[tuple[Resolved, ...]], *, serving: Serving | None = None
    ) -> int:
        return self._noted("resolve", super().resolve(asked, tenant, self._held_back(settle), serving=serving))

    def verify(self, resolved: Resolved, tenant: str, settle: Settle[Facts], *, serving: Serving | None = None) -> int:
        return self._noted("verify", super().verify(resolved, tenant, self._held_back(settle), serving=serving))

    def fetch(
        self,
        wanted: Sequence[Resolved],
        tenant: str,
        settle: Settle[tuple[Image, ...]],
        *,
        priority: int = 0,
        serving: Serving | None = None,
    ) -> int:
        held_back = self._held_back(settle)
        return self._noted("fetch", super().fetch(wanted, tenant, held_back, priority=priority, serving=serving))

    def release(self, request: int) -> None:
        self.released.append(request)
        super().release(request)

    def arrive(self) -> int:
        """All answers that are on their way; how many."""
        count = len(self._on_their_way)
        for _ in range(count):
            self._on_their_way.popleft()()
        return count

    def _noted(self, what: str, number: int) -> int:
        self.asked[number] = what
        return number

    def _held_back(self, settle: Settle[T]) -> Settle[T]:
        def answered(outcome: T | Failure) -> None:
            if self.late:
                self._on_their_way.append(lambda: settle(outcome))
            else:
                settle(outcome)

        return answered
