"""Who has to go. The policy orders candidates, the plan stops at enough; moving bytes is others' work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from adapterd.gpu_cache.budgets import Shares, Usage
from adapterd.loader.identity import VersionKey


@dataclass(frozen=True, slots=True)
class Candidate:
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

    def order(self, candidates: Sequence[Candidate]) -> list[Candidate]: ...


class LeastRecentlyUsed:
    """Longest unused first."""

    def order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=lambda c: c.last_used)


@dataclass(frozen=True, slots=True)
class Want:
    """So much of one thing is wanted; `freed` says how much of it comes free when a candidate goes."""

    shares: Shares
    amount: int
    freed: Callable[[Candidate], int]


def pages_wanted(budget: Shares, pages: int) -> Want:
    return Want(budget, pages, lambda candidate: candidate.pages)


def slots_wanted(shares: Shares, slots: int) -> Want:
    return Want(shares, slots, lambda _: 1)


def plan_evictions(
    policy: Policy, tenant: str, wants: Sequence[Want], candidates: Sequence[Candidate]
) -> list[Candidate] | None:
    """The victims after whose going `tenant` may take all that it wants, or None if that cannot be had now.

    All or nothing: nobody is evicted for a request that has to wait anyway. Where the tenant's own maximum
    is what stands in the way, only its own adapters can help, so those go first.
    """
    used = [want.shares.used.copy() for want in wants]
    victims: list[Candidate] = []
    waiting = policy.order(candidates)
    while (lacking := _lacking(tenant, wants, used)) is not None:
        want, state = lacking
        able = waiting
        if not want.shares.within_maximum(tenant, want.amount, state):
            able = [c for c in waiting if c.key.tenant == tenant]
        chosen = _next_victim(able, tenant, want, state)
        if chosen is None:
            return None
        waiting.remove(chosen)
        victims.append(chosen)
        for each, after in zip(wants, used, strict=True):
            after[chosen.key.tenant] -= each.freed(chosen)
    return victims


def _lacking(tenant: str, wants: Sequence[Want], used: Sequence[Usage]) -> tuple[Want, Usage] | None:
    """The first thing of which it may not take enough."""
    pairs = zip(wants, used, strict=True)
    return next((pair for pair in pairs if not pair[0].shares.may_take(tenant, pair[0].amount, pair[1])), None)


def _next_victim(candidates: Sequence[Candidate], taker: str, want: Want, used: Usage) -> Candidate | None:
    """The first that leaves its tenant's share whole; failing that, the first of a tenant above its share."""
    for c in candidates:
        if want.shares.spares_share(c.key.tenant, taker, want.freed(c), used):
            return c
    return next((c for c in candidates if want.shares.above_share(c.key.tenant, used)), None)
