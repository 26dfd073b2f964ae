"""Whether what leases claim holds: the host is asked to verify, its answers are shared and kept until trust changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from adapterd.gpu_cache.asking import Desk
from adapterd.gpu_cache.composition import total_rank
from adapterd.gpu_cache.host.interface import Facts, Failure
from adapterd.gpu_cache.host.records import Verified, claim_of
from adapterd.gpu_cache.records import Ask, Entry, LeaseRecord
from adapterd.gpu_cache.residency import Ledger
from adapterd.loader.errors import Problem

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved

Refusal = Callable[["Resolved", str | None], Problem | None]
"""Why a version that this key signed is not served, whatever it says; None if it is."""


class ClaimsOwner(Protocol):
    """Whom claims tell, with the cache's lock held."""

    def fail(self, record: LeaseRecord, problems: tuple[Problem, ...]) -> None: ...

    def proceed(self, record: LeaseRecord) -> None:
        """One of its claims was found to hold."""
        ...

    def tidy(self, entry: Entry) -> None: ...


class Claims:
    """Methods need the cache's lock."""

    def __init__(self, desk: Desk, ledger: Ledger, refusal: Refusal, owner: ClaimsOwner) -> None:
        self._desk, self._ledger, self._refusal, self._owner = desk, ledger, refusal, owner

    def hold(self, record: LeaseRecord) -> bool:
        """Whether all of the lease's claims are known to hold by what is trusted now; if not, the host is at it."""
        known = [self._verify(entry, resolved) for entry, resolved in record.claims]  # all of them are asked for
        return all(known)

    def let_go(self, entry: Entry) -> None:
        """Of what the host holds for its checks: nobody waits for it."""
        for check in entry.checks.values():
            self._desk.let_go(check)
        entry.checks.clear()

    def _verify(self, entry: Entry, resolved: Resolved) -> bool:
        """Equal claims share one request. After a change of trust even what is resident is verified again, once."""
        claim, now = claim_of(resolved), self._desk.trust_changes
        known = entry.verified.get(claim)
        if known is not None and known.trust_changes == now:
            return True
        check = entry.checks.get(claim)
        if check is not None and not check.answered:
            return False
        self._desk.let_go(check)
        then = partial(self._verified, entry, Verified(resolved, now))
        entry.checks[claim] = self._desk.verify(resolved, entry.key.tenant, then)
        return False

    def _verified(self, entry: Entry, verified: Verified, ask: Ask, outcome: Facts | Failure) -> None:
        """A claim that does not hold fails those who made it, and nobody else (I17)."""
        claim = claim_of(verified.resolved)
        if entry.checks.get(claim) is not ask:
            return
        problems = outcome.problems if isinstance(outcome, Failure) else self._refused(verified.resolved, outcome)
        if isinstance(outcome, Failure) or problems:
            self._desk.let_go(entry.checks.pop(claim))
            for record in list(entry.waiting.values()):
                if any(e is entry and claim_of(r) == claim for e, r in record.claims):
                    self._owner.fail(record, problems)
        else:
            entry.verified[claim] = verified
            if entry.facts is None:
                entry.facts, entry.rank = outcome, total_rank([outcome.manifest])
            self._ledger.verified(entry.key, verified.resolved, outcome)
            for record in list(entry.waiting.values()):
                self._owner.proceed(record)
        self._owner.tidy(entry)

    def _refused(self, resolved: Resolved, facts: Facts) -> tuple[Problem, ...]:
        problem = self._refusal(resolved, facts.publisher)
        return () if problem is None else (problem,)
