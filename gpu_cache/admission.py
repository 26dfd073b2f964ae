"""What is decided about a lease: which versions it means, and whether they can ever be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from adapterd.gpu_cache.budgets import Budget
from adapterd.gpu_cache.composition import Asked, total_rank
from adapterd.gpu_cache.host.loading import Loader
from adapterd.gpu_cache.records import Entry, LeaseRecord, Place
from adapterd.loader.errors import AdapterdError, Code, NotFound, Problem, error, reject
from adapterd.loader.identity import BasePin, Ref, VersionKey

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved


def resolve_all(loader: Loader, asked: Sequence[Asked], tenant: str) -> tuple[Resolved, ...]:
    """The version of every REF, in order. Runs on a loader thread.

    Another tenant's REF gets the answer of an unknown one, and nobody outside is asked about it (I9).

    Raises AdapterdError: NOT_FOUND, STATEMENT_MISMATCH, and the source's own.
    """
    for each in asked:
        if each.ref.tenant != tenant:
            raise missing(each.ref)
    return tuple(_resolve_one(loader, each.ref, tenant) for each in asked)


def missing(ref: Ref) -> AdapterdError:
    """The one answer for what is not there and for what is not yours."""
    return error(
        Code.NOT_FOUND, str(ref), "there is no such adapter, alias or version for this tenant",
        "Check the name, and that an alias was set.",
    )  # fmt: skip


def short_cut(
    asked: Sequence[Asked], tenant: str, base: BasePin, entries: Mapping[VersionKey, Entry]
) -> tuple[Resolved, ...] | None:
    """What `resolve_all` would say, if every REF names a digest whose verified bytes are here; else None."""
    found: list[Resolved] = []
    for ref in (each.ref for each in asked):
        if ref.tenant != tenant or ref.digest is None or ref.alias is not None:
            return None
        entry = entries.get(VersionKey(tenant, base, ref.digest))
        known = entry.verified.values() if entry is not None and entry.place is not Place.ABSENT else ()
        resolved = next((each.resolved for each in known if each.resolved.adapter == ref.name), None)
        if resolved is None:
            return None
        found.append(resolved)
    return tuple(found)


def inadmissible(record: LeaseRecord, vram: Budget, host: Budget, max_rank: int) -> Problem | None:
    """Why the lease can never be served, as far as its components are known by now."""
    known = [entry for entry in record.entries if entry.prepared is not None]
    rank = total_rank(e.prepared.manifest for e in known if e.prepared is not None)
    if rank > max_rank:
        return reject(
            Code.COMPOSITION_INVALID, _where(record),
            f"a module would get rank {rank}, at most {max_rank} is served",
            "Take fewer or smaller adapters, or raise max_composition_rank.",
        )  # fmt: skip
    pages = sum(entry.pages for entry in known)
    return _too_large(record, pages, vram) or _too_large(record, pages, host)


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


def _resolve_one(loader: Loader, ref: Ref, tenant: str) -> Resolved:
    try:
        resolved = loader.resolve(ref, tenant)
    except NotFound as cause:
        if cause.code is Code.NOT_FOUND:
            raise missing(ref) from cause
        raise
    _check_answer(ref, tenant, resolved)
    return resolved


def _check_answer(ref: Ref, tenant: str, resolved: Resolved) -> None:
    """A source is not trusted, and all that follows is checked against its answer: it must fit the question."""
    asked = (tenant, ref.name, ref.digest or resolved.version_digest)
    given = (resolved.tenant, resolved.adapter, resolved.version_digest)
    if asked != given:
        raise error(Code.STATEMENT_MISMATCH, str(ref), f"asked for {asked}, the source answered with {given}")


def _where(record: LeaseRecord) -> str:
    return " + ".join(str(each.ref) for each in record.asked)
