"""What is decided about a lease: which versions it means, and whether they can ever be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from adapterd.gpu_cache.budgets import Budget, Shares
from adapterd.gpu_cache.composition import Asked, total_rank
from adapterd.gpu_cache.host.resolving import is_pinned
from adapterd.gpu_cache.records import Entry, LeaseRecord, Place
from adapterd.loader.errors import Code, Problem, reject
from adapterd.loader.identity import BasePin, VersionKey

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved


def short_cut(
    asked: Sequence[Asked], tenant: str, base: BasePin, entries: Mapping[VersionKey, Entry]
) -> tuple[Resolved, ...] | None:
    """What the host would say, if every REF names a digest whose verified bytes are in VRAM; else None."""
    found: list[Resolved] = []
    for ref in (each.ref for each in asked):
        if ref.tenant != tenant or not is_pinned(ref):
            return None
        entry = entries.get(VersionKey(tenant, base, ref.digest or ""))
        known = entry.verified.values() if entry is not None and entry.place is not Place.ABSENT else ()
        resolved = next((each.resolved for each in known if each.resolved.adapter == ref.name), None)
        if resolved is None:
            return None
        found.append(resolved)
    return tuple(found)


def inadmissible(record: LeaseRecord, vram: Budget, slots: Shares, max_rank: int) -> Problem | None:
    """Why the lease can never be served, as far as its components are known by now."""
    known = [entry for entry in record.entries if entry.facts is not None]
    rank = known[0].rank if len(known) == 1 else total_rank(e.facts.manifest for e in known if e.facts is not None)
    if rank > max_rank:
        return reject(
            Code.COMPOSITION_INVALID, _where(record),
            f"a module would get rank {rank}, at most {max_rank} is served",
            "Take fewer or smaller adapters, or raise max_composition_rank.",
        )  # fmt: skip
    return _too_large(record, sum(entry.pages for entry in known), vram) or _too_many(record, slots)


def _too_large(record: LeaseRecord, pages: int, budget: Budget) -> Problem | None:
    ceiling = budget.ceiling(record.tenant)
    if pages <= ceiling:
        return None
    size = budget.page_bytes
    return reject(
        Code.BUDGET_EXCEEDED, _where(record),
        f"needs {pages * size} bytes ({pages} pages) of {budget.memory}; "
        f"tenant {record.tenant} can have {ceiling * size} ({ceiling} pages)",
        f"Raise {budget.memory}_bytes or the tenant's maximum.",
    )  # fmt: skip


def _too_many(record: LeaseRecord, slots: Shares) -> Problem | None:
    wanted, ceiling = len(record.entries), slots.ceiling(record.tenant)
    if wanted <= ceiling:
        return None
    return reject(
        Code.BUDGET_EXCEEDED, _where(record),
        f"needs {wanted} slots of {slots.total}; tenant {record.tenant} can have {ceiling}",
        "Raise max_residents.",
    )  # fmt: skip


def _where(record: LeaseRecord) -> str:
    return " + ".join(str(each.ref) for each in record.asked)
