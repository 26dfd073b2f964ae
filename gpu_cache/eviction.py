"""Who has to go. The policy orders candidates, the plan stops at enough; moving bytes is others' work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from threading import Lock
from typing import Generic, NamedTuple, Protocol, TypeVar

from adapterd.gpu_cache.budgets import Shares, Usage
from adapterd.loader.identity import VersionKey

_LOG = logging.getLogger(__name__)


class Candidate(NamedTuple):
    """Something that may go: nobody pins it.

    Attributes:
        key: what it is; its tenant is `key.tenant`.
        pages: what its going would free.
        last_used: tick of its last acquire or step; larger is later.
    """

    key: VersionKey
    pages: int
    last_used: int


class Policy(Protocol):
    """Sees candidates only, and says in which order they go."""

    def order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """All of `candidates`, the very objects, each once.

        Called with a lock of the cache's or the host's held, by two threads at once if both are: it computes and
        nothing else, and asks nobody, least of all the cache. Anything else than such an order counts as a fault.
        """
        ...


class LeastRecentlyUsed:
    """Longest unused first."""

    def order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=attrgetter("last_used"))


class GuardedPolicy:
    """A policy whose faults hurt nobody: for each order that it does not give, the least recently used go first.

    A fault is an exception, or an answer that is no order of the candidates. All are counted; the first is told in
    the log, for they may come with every lease.
    """

    def __init__(self, policy: Policy | None) -> None:
        self._policy = None if type(policy) is LeastRecentlyUsed else policy
        self._fallback = LeastRecentlyUsed()
        self._lock = Lock()  # a leaf: tiers share it
        self.faults = 0

    @classmethod
    def of(cls, policy: Policy | None) -> GuardedPolicy:
        """The policy, guarded once; without one the least recently used go first."""
        return policy if isinstance(policy, cls) else cls(policy)

    @property
    def own(self) -> bool:
        """Whether somebody's own policy is asked. Else the order is known, and can be kept."""
        return self._policy is not None

    def order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        if self._policy is None or not candidates:
            return self._fallback.order(candidates)
        try:
            ordered = list(islice(self._policy.order(list(candidates)), len(candidates) + 1))
            if len(ordered) == len(candidates) and set(map(id, ordered)) == set(map(id, candidates)):
                return ordered
            fault: BaseException = ValueError(f"{len(ordered)} of {len(candidates)}, not each of them once")
        except KeyboardInterrupt:  # of this thread
            raise
        except BaseException as raised:  # noqa: BLE001 - whatever a stranger's code raises, an exit, too
            fault = raised
        self._note(fault)
        return self._fallback.order(candidates)

    def _note(self, fault: BaseException) -> None:
        with self._lock:
            self.faults += 1
            first = self.faults == 1
        if first:
            name = type(self._policy).__name__
            _LOG.error("the eviction policy %s gives no order; the least recently used go first", name, exc_info=fault)


class Sized(Protocol):
    """What a plan looks at: a candidate, or what one is made of."""

    @property
    def key(self) -> VersionKey: ...

    @property
    def pages(self) -> int: ...


C = TypeVar("C", bound=Sized)
C_co = TypeVar("C_co", bound=Sized, covariant=True)


class Order(Protocol[C_co]):
    """Those that may go, in the order in which they do. Nothing happens to them before all are chosen."""

    def take(self, able: Callable[[str], bool], fits: Callable[[C_co], bool]) -> C_co | None:
        """The first that fits, of a tenant that is able; it is not given again."""
        ...


class Want(NamedTuple):
    """So much of one thing is wanted; `freed` says how much of it comes free when one goes."""

    shares: Shares
    amount: int
    freed: Callable[[Sized], int]


def pages_wanted(budget: Shares, pages: int) -> Want:
    return Want(budget, pages, _pages)


def slots_wanted(shares: Shares, slots: int) -> Want:
    return Want(shares, slots, _one)


def _pages(of: Sized) -> int:
    return of.pages


def _one(_: Sized) -> int:
    return 1


def plan_evictions(
    policy: Policy, tenant: str, wants: Sequence[Want], candidates: Sequence[Candidate]
) -> list[Candidate] | None:
    """`plan_in_order`, in the order that the policy says."""
    return plan_in_order(lambda: Listed(policy.order(candidates)), tenant, wants)


def plan_in_order(ordered: Callable[[], Order[C]], tenant: str, wants: Sequence[Want]) -> list[C] | None:
    """The victims after whose going `tenant` may take all that it wants, or None if that cannot be had now.

    All or nothing: nobody is evicted for a request that has to wait anyway. Where the tenant's own maximum
    is what stands in the way, only its own adapters can help, so those go first.

    Args:
        ordered: asked if anybody has to go.
    """
    lacking = _lacking(tenant, [(want, want.shares.used) for want in wants])
    if lacking is None:
        return []
    order, victims = ordered(), list[C]()
    states = [(want, want.shares.used.copy()) for want in wants]
    while lacking is not None:
        chosen = _next_victim(order, tenant, *lacking)
        if chosen is None:
            return None
        victims.append(chosen)
        for each, after in states:
            after[chosen.key.tenant] -= each.freed(chosen)
        lacking = _lacking(tenant, states)
    return victims


def _lacking(tenant: str, states: Sequence[tuple[Want, Usage]]) -> tuple[Want, Usage] | None:
    """The first thing of which it may not take enough."""
    for state in states:
        want, used = state
        if not want.shares.may_take(tenant, want.amount, used):
            return state
    return None


def _next_victim(order: Order[C], taker: str, want: Want, used: Usage) -> C | None:
    """The first that leaves its tenant's share whole; failing that, the first of a tenant above its share."""
    shares = want.shares
    only_own = not shares.within_maximum(taker, want.amount, used)

    def able(tenant: str) -> bool:
        return tenant == taker or (not only_own and shares.above_share(tenant, used))

    def spared(one: C) -> bool:
        return shares.spares_share(one.key.tenant, taker, want.freed(one), used)

    return order.take(able, spared) or order.take(lambda each: each != taker and able(each), lambda _: True)


class Listed(Generic[C]):
    """Order of a list."""

    def __init__(self, waiting: Sequence[C]) -> None:
        self._left = list(waiting)

    def take(self, able: Callable[[str], bool], fits: Callable[[C], bool]) -> C | None:
        for at, one in enumerate(self._left):
            if able(one.key.tenant) and fits(one):
                return self._left.pop(at)
        return None
