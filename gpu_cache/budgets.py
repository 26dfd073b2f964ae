"""Budgets: how much of one memory (arena or host slab) a tenant may hold, and what nobody may take from it.

Two numbers a tenant: a maximum, and a guaranteed share. The guarantee is kept in two ways (I10): others may
not evict below it, and others may not take free pages that are needed to fill it. Hence the invariant

    free pages ≥ Σ over tenants of max(0, guaranteed − used)

which holds at the start (the guarantees fit into the memory) and is kept by `may_take` and `above_share`.
An adapter goes as a whole. One that lies across the edge of its tenant's share may go if nothing else can:
else the pages beyond the share would be guaranteed, too, and `ceiling` could not be reached by others.
"""

from __future__ import annotations

from collections import Counter
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


Usage = Counter[str]
"""Pages by tenant."""


class Budget:
    """The rules for one memory, and who holds how much. Pages. Guarded by the cache's lock."""

    def __init__(
        self,
        memory: Memory,
        total_pages: int,
        page_bytes: int,
        tenants: Mapping[str, TenantBudget],
        default: TenantBudget,
    ) -> None:
        """Raises Failed (SETTINGS_INVALID) when the guarantees exceed the memory."""
        self.memory, self.total, self.page_bytes = memory, total_pages, page_bytes
        self.used: Usage = Counter()
        self._default_maximum = self._pages(default.maximum(memory))
        self._maximum = {t: self._pages(b.maximum(memory)) for t, b in tenants.items()}
        self._guaranteed = {t: -(-b.guaranteed(memory) // page_bytes) for t, b in tenants.items()}
        if default.guaranteed(memory) or sum(self._guaranteed.values()) > total_pages:
            raise error(
                Code.SETTINGS_INVALID, f"{memory} budgets",
                f"guaranteed shares of {sum(self._guaranteed.values())} pages do not fit into {total_pages}",
                "Lower them, enlarge the memory, and give no guarantee to unnamed tenants.",
            )  # fmt: skip

    @property
    def free(self) -> int:
        return self.total - self.used.total()

    def ceiling(self, tenant: str) -> int:
        """The most that the tenant can ever hold, with everybody else at their guarantee only."""
        others = sum(pages for name, pages in self._guaranteed.items() if name != tenant)
        return min(self.maximum(tenant), self.total - others)

    def maximum(self, tenant: str) -> int:
        return self._maximum.get(tenant, self._default_maximum)

    def guaranteed(self, tenant: str) -> int:
        return self._guaranteed.get(tenant, 0)

    def within_maximum(self, tenant: str, pages: int, used: Usage) -> bool:
        return used[tenant] + pages <= self.maximum(tenant)

    def may_take(self, tenant: str, pages: int, used: Usage) -> bool:
        """Whether `pages` more may go to the tenant, were `used` the present state."""
        owed = sum(max(0, share - used[name]) for name, share in self._guaranteed.items() if name != tenant)
        return self.within_maximum(tenant, pages, used) and self.total - used.total() - pages >= owed

    def spares_share(self, victim: str, taker: str, pages: int, used: Usage) -> bool:
        """Whether the victim keeps its share when it loses `pages` to `taker`, were `used` the present state."""
        return victim == taker or used[victim] - pages >= self.guaranteed(victim)

    def above_share(self, victim: str, used: Usage) -> bool:
        """Whether the victim holds more than its share. Only then may anything at all be taken from it."""
        return used[victim] > self.guaranteed(victim)

    def take(self, tenant: str, pages: int) -> None:
        self.used[tenant] += pages

    def give_back(self, tenant: str, pages: int) -> None:
        self.used[tenant] -= pages
        assert self.used[tenant] >= 0, f"{tenant} gave back more than it had"

    def _pages(self, nbytes: int | None) -> int:
        return self.total if nbytes is None else min(self.total, nbytes // self.page_bytes)
