"""What the cache holds by itself: pins until they are let go, prefetches until the bytes are there.

A pin is found by its tenant and the REF as it was named; the version that the REF meant then is what it holds, even
if an alias moves on (`routes` follows one). All pins and routes of a tenant together stay within its budget.

A prefetch goes behind everybody. It takes room in VRAM only while no lease waits for any, and then free room, or
that of what its own tenant had prefetched before and nobody has used since. Where there is none it fails with
BUDGET_EXCEEDED, and the bytes stay in host memory, if that is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from adapterd.gpu_cache.budgets import Budget, Shares
from adapterd.gpu_cache.leases import Lease, LeaseBooks, check_ready
from adapterd.gpu_cache.records import Entry, LeaseRecord, LeaseState, Purpose
from adapterd.loader.errors import Code, Problem, reject
from adapterd.loader.identity import Ref


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin as it is now. `ref` has its alias written out; `problem` says why it holds nothing, if it does not."""

    tenant: str
    ref: str
    state: LeaseState
    problem: Problem | None


class KeptLease(Lease):
    """A look at what the cache holds by itself. Dropping it changes nothing, and is no leak.

    It cannot be used in a step: acquire for that. `release` gives up a prefetch that is not there yet; a pin ends with
    `AdapterCache.unpin` only. `pause` and `resume` do nothing.
    """

    def __init__(self, books: LeaseBooks, record: LeaseRecord) -> None:
        super().__init__(books, record, deque(maxlen=0))

    @property
    def ready(self) -> bool:
        """Whether it is there, or was when the prefetch ended."""
        return self._record.brought or super().ready

    def _check(self) -> None:
        if not self._record.brought:
            check_ready(self._record)

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def release(self) -> None:
        if self._record.purpose.brief:
            super().release()


class Pins:
    """Pins by tenant and REF. Guarded by the cache's lock."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], LeaseRecord] = {}

    def get(self, tenant: str, ref: Ref) -> LeaseRecord | None:
        return self._records.get(_place(tenant, ref))

    def put(self, tenant: str, ref: Ref, record: LeaseRecord) -> None:
        self._records[_place(tenant, ref)] = record

    def take(self, tenant: str, ref: Ref) -> LeaseRecord | None:
        """Off the list."""
        return self._records.pop(_place(tenant, ref), None)

    def take_all(self) -> list[LeaseRecord]:
        taken = list(self._records.values())
        self._records.clear()
        return taken

    def rows(self) -> tuple[Pin, ...]:
        return tuple(
            Pin(tenant, ref, record.state, record.problems[0] if record.problems else None)
            for (tenant, ref), record in sorted(self._records.items())
        )


def _place(tenant: str, ref: Ref) -> tuple[str, str]:
    return tenant, str(replace(ref, alias=ref.wanted_alias))


def too_much_kept(record: LeaseRecord, entries: Iterable[Entry], budget: Budget, slots: Shares) -> Problem | None:
    """Why a pin or a route may not keep its versions beside what its tenant keeps already."""
    if record.purpose is not Purpose.KEEP:
        return None
    kept = {*record.entries, *(e for e in entries if e.key.tenant == record.tenant and e.kept)}
    pages = sum(entry.pages for entry in kept if entry.facts is not None)
    ceiling, size = budget.ceiling(record.tenant), budget.page_bytes
    if len(kept) > slots.ceiling(record.tenant):
        return reject(
            Code.BUDGET_EXCEEDED, " + ".join(str(each.ref) for each in record.asked),
            f"the pins and routes of tenant {record.tenant} would hold {len(kept)} slots of {slots.total}; "
            f"it can have {slots.ceiling(record.tenant)}",
            "Unpin something, or raise max_residents.",
        )  # fmt: skip
    if pages <= ceiling:
        return None
    return reject(
        Code.BUDGET_EXCEEDED, " + ".join(str(each.ref) for each in record.asked),
        f"the pins and routes of tenant {record.tenant} would hold {pages * size} bytes of {budget.memory}; "
        f"it can have {ceiling * size}",
        "Unpin something, or raise the tenant's maximum.",
    )  # fmt: skip


def no_room_to_prefetch(record: LeaseRecord) -> Problem:
    return reject(
        Code.BUDGET_EXCEEDED, " + ".join(str(each.ref) for each in record.asked),
        "there is no room in vram that a prefetch may take", "Acquire or pin it: a lease may evict for it.",
    )  # fmt: skip
