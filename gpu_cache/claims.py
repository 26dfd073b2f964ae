"""Whether what leases claim holds: the host is asked to verify, its answers are shared and kept until trust changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from adapterd.gpu_cache.asking import Desk
from adapterd.gpu_cache.host.interface import Facts, Failure
from adapterd.gpu_cache.host.records import Verified, claim_of
from adapterd.gpu_cache.records import Ask, Entry, LeaseRecord
from adapterd.gpu_cache.remembered import Remembered
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

    def __init__(
        self, desk: Desk, ledger: Ledger, remembered: Remembered, refusal: Refusal, owner: ClaimsOwner
    ) -> None:
        self._desk, self._ledger, self._remembered = desk, ledger, remembered
        self._refusal, self._owner = refusal, owner

    def hold(self, record: LeaseRecord) -> bool:
        """Whether all of the lease's claims are known to hold by what is trusted now; if not, the host is at it."""
        now, holds = self._desk.trust_changes, True
        for entry, resolved in record.claims:  # all of them are asked for
            known = entry.verified.get((resolved.adapter, resolved.version_number))
            if known is None or known.trust_changes != now:
                self._ask(entry, resolved, now)
                holds = False
        return holds

    def known(self, entry: Entry, resolved: Resolved, facts: Facts, trust_changes: int) -> tuple[Problem, ...]:
        """The host said at once that the claim holds, by what was trusted then. Why it is not served all the same."""
        problems = self._refused(resolved, facts)
        known = entry.verified.get(claim_of(resolved))
        same = known is not None and (known.trust_changes, known.publisher) == (trust_changes, facts.publisher)
        if not problems and not same:
            self._accept(entry, Verified(resolved, trust_changes), facts)
        return problems

    def remember(self, entry: Entry) -> None:
        """It is found no more."""
        self._remembered.keep(entry)

    def remind(self, entry: Entry) -> None:
        """A new entry knows what it was verified as before it went."""
        for verified in self._remembered.remind(entry):
            assert entry.facts is not None
            self._ledger.verified(entry.key, verified.resolved, entry.facts.manifest, verified.publisher)

    def let_go(self, entry: Entry) -> None:
        """Of what the host holds for its checks: nobody waits for it."""
        for check in entry.checks.values():
            self._desk.let_go(check)
        entry.checks.clear()

    def _ask(self, entry: Entry, resolved: Resolved, now: int) -> None:
        """Equal claims share one request. After a change of trust even what is resident is verified again, once."""
        claim = claim_of(resolved)
        check = entry.checks.get(claim)
        if check is not None and not check.answered:
            return
        self._desk.let_go(check)
        then = partial(self._verified, entry, Verified(resolved, now))
        entry.checks[claim] = self._desk.verify(resolved, entry.key.tenant, then)

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
            self._accept(entry, verified, outcome)
            for record in list(entry.waiting.values()):
                self._owner.proceed(record)
        self._owner.tidy(entry)

    def _accept(self, entry: Entry, verified: Verified, facts: Facts) -> None:
        entry.verified[claim_of(verified.resolved)] = replace(verified, publisher=facts.publisher)
        rank = self._ledger.verified(entry.key, verified.resolved, facts.manifest, facts.publisher)
        if entry.facts is None:
            entry.facts, entry.rank = facts, rank

    def _refused(self, resolved: Resolved, facts: Facts) -> tuple[Problem, ...]:
        problem = self._refusal(resolved, facts.publisher)
        return () if problem is None else (problem,)
