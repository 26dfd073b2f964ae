"""Budgets: how much of one memory (arena or host slab) a tenant may hold, and what nobody may take from it.

Two numbers a tenant: a maximum, and a guaranteed share. The guarantee is kept in two ways (I10): others may
not evict below it, and others may not take free pages that are needed to fill it. Hence the invariant

    free pages ≥ Σ over tenants of max(0, guaranteed − used)

which holds at the start (the guarantees fit into the memory) and is kept by `may_take` and `above_share`.
An adapter goes as a whole. One that lies across the edge of its tenant's share may go if nothing else can:
else the pages beyond the share would be guaranteed, too, and `ceiling` could not be reached by others.

Slots follow the same rules (`slot_shares`), so that many small adapters of one tenant cannot keep others out of
memory that is free or theirs. What lacks decides whose turn it is to go: for pages who is above its share of
pages, for slots who is above its share of slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from adapterd.loader.errors import Code, Problem, error, reject

Memory = Literal["vram", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBudget:
    """What one tenant may hold. Bytes; a maximum of None is the memory's size.

    Attributes:
        max_vram_bytes, max_host_bytes: rounded down to whole pages.
        guaranteed_vram_bytes, guaranteed_host_bytes: rounded up to whole pages.
        max_loads: loads of this tenant that may run at once, or None for as many as there are loader threads.
        max_waiting: leases, and requests to the host, that may wait at once; more are refused (QUEUE_FULL).
    """

    max_vram_bytes: int | None = None
    max_host_bytes: int | None = None
    guaranteed_vram_bytes: int = 0
    guaranteed_host_bytes: int = 0
    max_loads: int | None = None
    max_waiting: int = 10_000

    def maximum(self, memory: Memory) -> int | None:
        return self.max_vram_bytes if memory == "vram" else self.max_host_bytes

    def guaranteed(self, memory: Memory) -> int:
        return self.guaranteed_vram_bytes if memory == "vram" else self.guaranteed_host_bytes

    @property
    def has_share(self) -> bool:
        return self.guaranteed_vram_bytes > 0 or self.guaranteed_host_bytes > 0


def queue_full(tenant: str, most: int) -> Problem:
    return reject(
        Code.QUEUE_FULL, tenant, f"{most} requests of this tenant wait already",
        "Try again once some are served, or raise the tenant's max_waiting.",
    )  # fmt: skip


Usage = dict[str, int]
"""Pages (or slots) by tenant that has any."""


class Shares:
    """Who holds how much of one thing that is counted, and the rules for it. Guarded by the cache's lock.

    Args:
        total: how much of it there is.
        guaranteed: what nobody may take from a tenant; others have no guarantee. Together `total` at most.
        maximum: what a tenant may have at most; others may have `default_maximum`.
    """

    def __init__(
        self, total: int, guaranteed: Mapping[str, int], maximum: Mapping[str, int], default_maximum: int
    ) -> None:
        self.total = total
        self.used: Usage = {}
        self._guaranteed, self._maximum, self._default_maximum = guaranteed, maximum, default_maximum
        self._guaranteed_to_all = sum(guaranteed.values())

    @property
    def free(self) -> int:
        return self.total - sum(self.used.values())

    def ceiling(self, tenant: str) -> int:
        """The most that the tenant can ever hold, with everybody else at their guarantee only."""
        return min(self.maximum(tenant), self.total - self._guaranteed_to_all + self.guaranteed(tenant))

    def maximum(self, tenant: str) -> int:
        return self._maximum.get(tenant, self._default_maximum)

    def guaranteed(self, tenant: str) -> int:
        return self._guaranteed.get(tenant, 0)

    def within_maximum(self, tenant: str, amount: int, used: Usage) -> bool:
        return used.get(tenant, 0) + amount <= self.maximum(tenant)

    def may_take(self, tenant: str, amount: int, used: Usage) -> bool:
        """Whether so much more may go to the tenant, were `used` the present state."""
        if used.get(tenant, 0) + amount > self._maximum.get(tenant, self._default_maximum):
            return False
        left = self.total - sum(used.values()) - amount
        for name, share in self._guaranteed.items():  # what others are owed of their guarantees
            if name != tenant:
                left -= max(0, share - used.get(name, 0))
        return left >= 0

    def room(self, tenant: str) -> int:
        """How much more the tenant may take now, where nobody has a guarantee."""
        return min(self.free, self.maximum(tenant) - self.used.get(tenant, 0))

    def spares_share(self, victim: str, taker: str, amount: int, used: Usage) -> bool:
        """Whether the victim keeps its share when it loses so much to `taker`, were `used` the present state."""
        return victim == taker or used.get(victim, 0) - amount >= self.guaranteed(victim)

    def above_share(self, victim: str, used: Usage) -> bool:
        """Whether the victim holds more than its share. Only then may anything at all be taken from it."""
        return used.get(victim, 0) > self.guaranteed(victim)

    def take(self, tenant: str, amount: int) -> None:
        self.used[tenant] = self.used.get(tenant, 0) + amount

    def give_back(self, tenant: str, amount: int) -> None:
        assert self.used.get(tenant, 0) >= amount, f"{tenant} gave back more than it had"
        self.used[tenant] -= amount
        if not self.used[tenant]:
            del self.used[tenant]  # no book keeps the name of everybody who ever came


class Budget(Shares):
    """The pages of one memory."""

    def __init__(
        self,
        memory: Memory,
        total_pages: int,
        page_bytes: int,
        tenants: Mapping[str, TenantBudget],
        default: TenantBudget,
    ) -> None:
        """Raises Failed (SETTINGS_INVALID) when the guarantees exceed the memory."""
        self.memory, self.page_bytes = memory, page_bytes

        def pages(nbytes: int | None) -> int:
            return total_pages if nbytes is None else min(total_pages, nbytes // page_bytes)

        self.guarantees = {
            tenant: share for tenant, b in tenants.items() if (share := -(-b.guaranteed(memory) // page_bytes))
        }
        maximum = {tenant: pages(b.maximum(memory)) for tenant, b in tenants.items()}
        super().__init__(total_pages, self.guarantees, maximum, pages(default.maximum(memory)))
        if default.guaranteed(memory) or sum(self.guarantees.values()) > total_pages:
            raise error(
                Code.SETTINGS_INVALID, f"{memory} budgets",
                f"guaranteed shares of {sum(self.guarantees.values())} pages do not fit into {total_pages}",
                "Lower them, enlarge the memory, and give no guarantee to unnamed tenants.",
            )  # fmt: skip


def slot_shares(slots: int, budget: Budget) -> Shares:
    """The shares of so many slots: one for each tenant with a guarantee of pages, and of the rest as much as its
    guarantee is of all pages.

    Raises Failed (SETTINGS_INVALID) if that is more than there are.
    """
    owners = budget.guarantees
    if len(owners) > slots:
        raise error(
            Code.SETTINGS_INVALID, "max_residents", f"{len(owners)} tenants have guaranteed shares of {slots} slots",
            "Raise it: each needs a slot at least.",
        )  # fmt: skip
    rest = slots - len(owners)
    shares = {tenant: 1 + rest * pages // budget.total for tenant, pages in owners.items()}
    return Shares(slots, shares, {}, slots)
