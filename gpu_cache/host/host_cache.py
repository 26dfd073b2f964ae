"""The host half in one process: verified versions, packed in a slab, shared by all who ask.

There is one lock. Public methods and the ends of jobs take it, for bookkeeping only; `settle` is called without
it, from a loader thread or from the thread of the answers, which no load can hold up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from adapterd.gpu_cache.budgets import TenantBudget
from adapterd.gpu_cache.eviction import LeastRecentlyUsed, Policy
from adapterd.gpu_cache.host.entries import Entries
from adapterd.gpu_cache.host.interface import AtHand, Facts, Failure, HostUsage, Image, Progress, Settle, Slab
from adapterd.gpu_cache.host.jobs import BROKEN, Answers, Desk, LoaderJobs
from adapterd.gpu_cache.host.loading import Dtypes, Loader, Serving
from adapterd.gpu_cache.host.meters import Meters
from adapterd.gpu_cache.host.packing import Packer
from adapterd.gpu_cache.host.pool import FairPool, LoaderPool
from adapterd.gpu_cache.host.records import Fetching, HostEntry, Request, Resolving, Verifying, claim_of
from adapterd.gpu_cache.host.requests import CLOSED, Requests
from adapterd.gpu_cache.host.resolving import resolve_all
from adapterd.gpu_cache.host.tier import HostTier
from adapterd.gpu_cache.host.verification import Verifier
from adapterd.loader.identity import BasePin, Ref, VersionKey
from adapterd.loader.sharding import WHOLE, Sharding

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.sources import Resolved

NO_BUDGETS: Mapping[str, TenantBudget] = {}


class HostCache:
    """Host over a loader and a slab of this process; see `interface.Host`.

    Besides, it can serve several workers: `serving` says for which base model and dtype a request is, if not
    for the host's own. Bytes are shared by requests for the same version, base, dtype and part (`Sharding`).
    """

    def __init__(
        self,
        slab: Slab,
        base: BaseSpec,
        *,
        loader: Loader,
        pool: LoaderPool,
        answers: LoaderPool | None = None,
        dtype: Dtypes = "auto",
        sharding: Sharding = WHOLE,
        tenants: Mapping[str, TenantBudget] = NO_BUDGETS,
        default_budget: TenantBudget = TenantBudget(),  # noqa: B008 - frozen
        policy: Policy | None = None,
        keep_host: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            slab: writable, and as large as the host may get; the loader packs for its page size.
            pool: where the loader is called; closed with the host.
            answers: where `settle` is called for what is known at once; else a thread of its own. Closed, too.
            keep_host: whether images that nobody holds stay until room is needed.
            clock: seconds, for the stages of a load.

        Raises:
            Failed: SETTINGS_INVALID when the guarantees exceed the slab.
        """
        self._serving, self._loader, self._keep = Serving(base, dtype, sharding), loader, keep_host
        self._lock = Lock()
        self._tier = HostTier(slab, tenants, default_budget, policy or LeastRecentlyUsed())
        self._pool, self._answers = pool, Answers()
        self._desk = Desk(self._answers, answers or FairPool(1, {}, None, name="answers"))
        self._jobs = LoaderJobs(pool, self._lock, self._answers)
        self._meters = Meters()
        self._verifier = Verifier(loader, self._jobs, self._meters, clock, self)
        self._packer = Packer(self._tier, self._jobs, self._answers, self._meters, clock, self)
        self._entries = Entries()
        self._requests = Requests(self._answers.waiting, tenants, default_budget)

    # The port

    @property
    def slab(self) -> Slab:
        return self._tier.slab

    @property
    def trust_changes(self) -> int:
        return self._loader.trust_changes

    def resolve(
        self,
        asked: Sequence[Ref],
        tenant: str,
        settle: Settle[tuple[Resolved, ...]],
        *,
        serving: Serving | None = None,
    ) -> int:
        with self._lock:
            request = Resolving(self._requests.next(), tenant, settle, tuple(asked))
            if self._admit(request):
                known = self._entries.known(request.asked, tenant, serving or self._serving)
                if known is not None:
                    self._resolved(request, known)
                else:
                    self._look_up(request)
            return self._leave(request)

    def verify(self, resolved: Resolved, tenant: str, settle: Settle[Facts], *, serving: Serving | None = None) -> int:
        with self._lock:
            entry = self._entries.wanted(resolved, tenant, serving or self._serving)
            request = Verifying(self._requests.next(), tenant, settle, entry, resolved)
            if self._admit(request, resolved):
                entry.users[request.number] = request
                if self._verifier.ask(entry, resolved, request):
                    self.verified(request)
            self.tidy(entry)
            return self._leave(request)

    def fetch(
        self,
        wanted: Sequence[Resolved],
        tenant: str,
        settle: Settle[tuple[Image, ...]],
        *,
        priority: int = 0,
        serving: Serving | None = None,
    ) -> int:
        with self._lock:
            entries = tuple(self._entries.wanted(resolved, tenant, serving or self._serving) for resolved in wanted)
            request = Fetching(self._requests.next(), tenant, settle, priority, entries, tuple(wanted))
            if self._admit(request, *wanted):
                self.begin(request)
            for entry in entries:
                self.tidy(entry)
            self._packer.serve()
            return self._leave(request)

    def at_hand(
        self, wanted: Sequence[Ref] | Sequence[Resolved], tenant: str, *, serving: Serving | None = None
    ) -> AtHand | None:
        with self._lock:
            trust_changes = self._loader.trust_changes
            found = [self._entries.here(each, tenant, serving or self._serving) for each in wanted]
            pairs = [pair for pair in found if pair is not None and self._verifier.knows(*pair)]
            if self._requests.closed or len(pairs) < len(wanted):
                return None
            entries, resolved = tuple([entry for entry, _ in pairs]), tuple([each for _, each in pairs])
            request = Fetching(self._requests.next(), tenant, None, 0, entries, resolved)
            self._requests.hold(request)
            for entry in entries:
                self._entries.touch(entry)
            facts = tuple([entry.facts(each) for entry, each in pairs])
            return AtHand(request.number, resolved, facts, self._packer.hold(request), trust_changes)

    def deliver(self, most: int | None = None) -> None:
        self._answers.deliver(most)

    def release(self, request: int) -> None:
        with self._lock:
            found = self._requests.find(request)
            if found is not None:
                self._answers.withdraw(found)
                self._drop(found)
                self._packer.serve()
            self._desk.hand_over()

    def forget(self, key: VersionKey) -> None:
        with self._lock:
            self._forget(self._entries.of_version(key))
            self._desk.hand_over()

    def rebase(self, base: BaseSpec) -> None:
        old, self._serving = self._serving.base.pin, replace(self._serving, base=base)
        self.forget_base(old)

    def forget_base(self, base: BasePin) -> None:
        """Drops all that was verified for that base, as `forget`: nobody serves it any more."""
        with self._lock:
            self._forget(self._entries.of_base(base))
            self._desk.hand_over()

    def usage(self) -> HostUsage:
        with self._lock:
            return self._tier.usage()

    def loading(self) -> Mapping[VersionKey, Progress]:
        return self._meters.rows()

    def close(self, timeout: float) -> None:
        with self._lock:
            self._requests.closed = self._desk.closed = True
            for request in self._requests:
                self._refuse(request, CLOSED)
        try:
            self._answers.deliver()
        finally:
            self._pool.close(timeout)
            self._desk.close(timeout)

    # What verifier and packer tell, with the lock held

    def verified(self, request: Verifying | Fetching) -> None:
        if isinstance(request, Verifying):
            self._answers.add(request, request.entry.facts(request.wanted))
            return
        request.unverified -= 1
        if not request.unverified:
            self._packer.line_up(request)
            self._packer.serve()

    def refused(self, request: Request, failure: Failure) -> None:
        self._refuse(request, failure)

    def broken(self, entry: HostEntry) -> None:
        """Who waits is told first. What is in disorder is found no more, so the next request begins anew."""
        waiting = [request for request in entry.users.values() if request.waits]
        for request in waiting:
            self._answers.add(request, BROKEN)
        if self._entries.holds(entry):
            self._tier.forget(entry)
            self._entries.leave(entry)
        for request in waiting:
            self._drop(request)

    def tidy(self, entry: HostEntry) -> None:
        """Gives back what an entry holds for nobody."""
        idle = entry.idle
        unread = entry.pages is not None and not entry.filling and not entry.holders
        if unread and (entry.forgotten or (idle and not self._keep)):
            self._tier.drop(entry)
        if idle and entry.pages is None and self._entries.holds(entry):
            self._entries.leave(entry)

    # With the lock held

    def _admit(self, request: Request, *wanted: Resolved) -> bool:
        """Puts it into the books, or refuses it."""
        failure = self._requests.enter(request, wanted)
        if failure is not None:
            self._refuse(request, failure)
        return request.waits

    def _look_up(self, request: Resolving) -> None:
        work = partial(resolve_all, self._loader, request.asked, request.tenant, lambda: request.waits)
        broken = partial(self._answers.add, request, BROKEN)
        self._jobs.start(request.tenant, work, partial(self._resolved, request), broken)

    def _resolved(self, request: Resolving, outcome: tuple[Resolved, ...] | Failure) -> None:
        """An answered one holds nothing."""
        self._answers.add(request, outcome)
        self._requests.leave(request)

    def begin(self, request: Fetching) -> None:
        """First what is not verified, then memory."""
        for entry in request.entries:
            entry.users[request.number] = request
            if not entry.filled:
                request.packed_for.add(entry)
        pairs = zip(request.entries, request.wanted, strict=True)
        claims = {(entry, claim_of(resolved)): resolved for entry, resolved in pairs}
        request.unverified = sum(not self._verifier.ask(e, resolved, request) for (e, _), resolved in claims.items())
        if not request.unverified:
            self._packer.line_up(request)

    def _refuse(self, request: Request, failure: Failure) -> None:
        self._answers.add(request, failure)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """It is over: nothing is held for it any more."""
        self._requests.leave(request)
        entries: tuple[HostEntry, ...] = ()
        if isinstance(request, Verifying):
            entries = (request.entry,)
        elif isinstance(request, Fetching):
            entries = request.entries
            self._packer.leave(request)
        for entry in entries:
            entry.users.pop(request.number, None)
            self._verifier.withdraw(entry, request)
            self.tidy(entry)

    def _forget(self, entries: Sequence[HostEntry]) -> None:
        for entry in entries:
            self._tier.forget(entry)
            self._entries.leave(entry)
            self.tidy(entry)
        self._packer.serve()

    def _leave(self, request: Request) -> int:
        self._desk.hand_over()
        return request.number
