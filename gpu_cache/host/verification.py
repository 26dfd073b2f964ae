"""Has versions verified: equal wishes share a job, and each claim is checked by itself (I17)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from adapterd.gpu_cache.host.interface import Failure, Stage
from adapterd.gpu_cache.host.jobs import LoaderJobs
from adapterd.gpu_cache.host.loading import Loader, Prepared
from adapterd.gpu_cache.host.meters import Meters
from adapterd.gpu_cache.host.records import Check, Fetching, HostEntry, Request, Verified, Verifying, claim_of
from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved


class VerifierOwner(Protocol):
    """Whom the verifier tells, with the host's lock held."""

    def verified(self, request: Verifying | Fetching) -> None:
        """One claim that the request waited for holds."""
        ...

    def refused(self, request: Verifying | Fetching, failure: Failure) -> None: ...

    def broken(self, entry: HostEntry) -> None:
        """Its books are in disorder."""
        ...

    def tidy(self, entry: HostEntry) -> None: ...


class Verifier:
    """Methods need the host's lock, but for the jobs' work."""

    def __init__(
        self,
        loader: Loader,
        jobs: LoaderJobs,
        meters: Meters,
        clock: Callable[[], float],
        owner: VerifierOwner,
    ) -> None:
        self._loader, self._jobs, self._meters = loader, jobs, meters
        self._clock, self._owner = clock, owner

    def ask(self, entry: HostEntry, resolved: Resolved, request: Verifying | Fetching) -> bool:
        """Whether the claim is known to hold by what is trusted now. If not, `verified` or `refused` follows."""
        claim = claim_of(resolved)
        if self.knows(entry, resolved):
            return True
        check = entry.checks.get(claim)
        if check is None:
            check = entry.checks[claim] = Check(resolved)
            self._start(entry, check)
        check.waiting[request.number] = (request, self._loader.trust_changes)
        return False

    def knows(self, entry: HostEntry, resolved: Resolved) -> bool:
        known = entry.verified.get(claim_of(resolved))
        return known is not None and known.trust_changes == self._loader.trust_changes

    def withdraw(self, entry: HostEntry, request: Request) -> None:
        """The request waits for nothing of this entry any more."""
        for check in entry.checks.values():
            check.waiting.pop(request.number, None)

    def _start(self, entry: HostEntry, check: Check) -> None:
        def work() -> tuple[Prepared, float]:
            if check.cancelled():
                raise error(Code.LEASE_CANCELLED, str(check.resolved.ref), "nobody waits for it any more")
            began = self._clock()
            meter = self._meters.begin(entry.key, Stage.VERIFY)
            try:
                prepared = self._loader.prepare(check.resolved, entry.serving, check.cancelled, meter)
            finally:
                self._meters.end(meter)
            return prepared, self._clock() - began

        end = partial(self._ended, entry, check, self._loader.trust_changes)
        self._jobs.start(entry.key.tenant, work, end, partial(self._owner.broken, entry))

    def _ended(self, entry: HostEntry, check: Check, before: int, outcome: tuple[Prepared, float] | Failure) -> None:
        """Who asked after trust had changed is not served by what was found before: for those it starts anew."""
        claim = claim_of(check.resolved)
        del entry.checks[claim]
        if not isinstance(outcome, Failure):
            entry.verified[claim] = Verified(check.resolved, before, outcome[0].publisher)
            if entry.prepared is None:
                entry.prepared, entry.verify_seconds = outcome
        in_vain = isinstance(outcome, Failure) and outcome.cancelled and check.given_up
        later = {n: w for n, w in check.waiting.items() if in_vain or w[1] > before}
        if later:
            again = entry.checks[claim] = Check(check.resolved, waiting=later)
            self._start(entry, again)
        for number, (request, _) in check.waiting.items():
            if number in later:
                continue
            if isinstance(outcome, Failure):
                self._owner.refused(request, outcome)
            else:
                self._owner.verified(request)
        self._owner.tidy(entry)
