"""One alias of a route: what it means now, and what it is going to mean once that is in VRAM. See `routes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from adapterd.gpu_cache.composition import Asked
from adapterd.gpu_cache.host.interface import Failure
from adapterd.gpu_cache.host.records import claim_of
from adapterd.gpu_cache.records import Ask, LeaseRecord, LeaseState
from adapterd.loader.errors import Problem
from adapterd.loader.identity import Ref

if TYPE_CHECKING:
    from adapterd.gpu_cache.asking import Then
    from adapterd.loader.sources import Resolved


class Keeper(Protocol):
    """What a branch asks of its cache, with the cache's lock held."""

    def resolve(self, ref: Ref, tenant: str, then: Then[tuple[Resolved, ...]]) -> Ask: ...

    def give_up(self, ask: Ask | None) -> None: ...

    def keep(self, asked: tuple[Asked, ...], tenant: str, resolved: tuple[Resolved, ...]) -> LeaseRecord:
        """Has the version brought and held. It may have failed already."""
        ...

    def let_go(self, record: LeaseRecord | None) -> None:
        """Of what was kept. Idempotent."""
        ...


class Branch:
    """One alias of a route: the version that is current, and the one that is to be. With the cache's lock held."""

    def __init__(self, keeper: Keeper, ref: Ref, tenant: str) -> None:
        self._keeper, self.ref, self._tenant = keeper, ref, tenant
        self.asked = (Asked(ref, 1.0),)
        self.current: LeaseRecord | None = None
        self._coming: LeaseRecord | None = None
        self._ask: Ask | None = None
        self.problem: Problem | None = None

    @property
    def known(self) -> tuple[Resolved, ...]:
        """The current version; nothing if there is none that can be had."""
        return self.current.resolved if self.current is not None and self.current.live else ()

    @property
    def busy(self) -> bool:
        """Whether it is finding out what the alias means, or loads that."""
        return self._ask is not None or self._coming is not None

    def refresh(self) -> None:
        """Only the latest answer counts, so that of two moves the last one wins."""
        self._keeper.give_up(self._ask)
        self._ask = self._keeper.resolve(self.ref, self._tenant, self._resolved)

    def turn(self) -> None:
        """A step boundary."""
        coming, current = self._coming, self.current
        if coming is not None and coming.state is LeaseState.READY:
            self._keeper.let_go(current)
            self.current, self._coming, self.problem = coming, None, None
        elif coming is not None and not coming.live:
            self.problem = coming.problems[0] if coming.problems else None
            self._drop_coming()
        if self.current is not None and not self.current.live:
            self.problem = self.current.problems[0] if self.current.problems else self.problem
            self.drop_current()
            if not self.busy:
                self.refresh()

    def withdraw(self, digest: str) -> None:
        """Whoever asks by the alias does not get that version any more."""
        if self._coming is not None and self._coming.resolved[0].version_digest == digest:
            self._drop_coming()
        if self.current is not None and self.current.resolved[0].version_digest == digest:
            self.drop_current()
        self.refresh()

    def drop_current(self) -> None:
        current, self.current = self.current, None
        self._keeper.let_go(current)

    def close(self) -> None:
        self._keeper.give_up(self._ask)
        self._ask = None
        self._drop_coming()
        self.drop_current()

    def _resolved(self, ask: Ask, outcome: tuple[Resolved, ...] | Failure) -> None:
        if ask is not self._ask:
            return
        self._ask = None
        if isinstance(outcome, Failure):
            self.problem = outcome.problems[0]
        elif _same(self.current, outcome[0]):
            self._drop_coming()
            self.problem = None
        elif not _same(self._coming, outcome[0]):
            self._drop_coming()
            self._coming = self._keeper.keep(self.asked, self._tenant, outcome)

    def _drop_coming(self) -> None:
        coming, self._coming = self._coming, None
        self._keeper.let_go(coming)


def _same(record: LeaseRecord | None, found: Resolved) -> bool:
    return (
        record is not None
        and record.live
        and bool(record.resolved)
        and (record.resolved[0].version_digest, claim_of(record.resolved[0])) == (found.version_digest, claim_of(found))
    )
