"""Who has to go. The policy orders candidates, the plan stops at enough; moving bytes is others' work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from adapterd.gpu_cache.budgets import Budget, Usage
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


Room = Callable[[Sequence[Candidate]], bool]
"""Whether, with these victims gone, the memory physically has room (slots, or a run of neighbouring pages)."""


def plan_evictions(
    policy: Policy, budget: Budget, tenant: str, pages: int, candidates: Sequence[Candidate], room: Room
) -> list[Candidate] | None:
    """The victims after whose going `tenant` may take `pages`, or None if that cannot be had now.

    All or nothing: nobody is evicted for a request that has to wait anyway. Where the tenant's own maximum
    is what stands in the way, only its own adapters can help, so those go first.
    """
    used = budget.used.copy()
    victims: list[Candidate] = []
    waiting = policy.order(candidates)
    while not (budget.may_take(tenant, pages, used) and room(victims)):
        able = waiting
        if not budget.within_maximum(tenant, pages, used):
            able = [c for c in waiting if c.key.tenant == tenant]
        chosen = _next_victim(able, tenant, budget, used)
        if chosen is None:
            return None
        waiting.remove(chosen)
        victims.append(chosen)
        used[chosen.key.tenant] -= chosen.pages
    return victims


def _next_victim(candidates: Sequence[Candidate], taker: str, budget: Budget, used: Usage) -> Candidate | None:
    """The first that leaves its tenant's share whole; failing that, the first of a tenant above its share."""
    for c in candidates:
        if budget.spares_share(c.key.tenant, taker, c.pages, used):
            return c
    return next((c for c in candidates if budget.above_share(c.key.tenant, used)), None)
