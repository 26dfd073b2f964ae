"""Which versions REFs mean: what a source is asked, and what of its answer is believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from adapterd.gpu_cache.host.loading import Loader
from adapterd.loader.errors import AdapterdError, Code, NotFound, error
from adapterd.loader.identity import Ref

if TYPE_CHECKING:
    from adapterd.loader.sources import Resolved


def resolve_all(loader: Loader, asked: Sequence[Ref], tenant: str, wanted: Callable[[], bool]) -> tuple[Resolved, ...]:
    """The version of every REF, in order. Runs on a loader thread.

    Another tenant's REF gets the answer of an unknown one, and nobody outside is asked about it (I9).

    Raises AdapterdError: NOT_FOUND, STATEMENT_MISMATCH, LEASE_CANCELLED once not `wanted()`, and the source's own.
    """
    for ref in asked:
        if ref.tenant != tenant:
            raise missing(ref)
    return tuple(_resolve_one(loader, ref, tenant, wanted) for ref in asked)


def missing(ref: Ref) -> AdapterdError:
    """The one answer for what is not there and for what is not yours."""
    return error(
        Code.NOT_FOUND, str(ref), "there is no such adapter, alias or version for this tenant",
        "Check the name, and that an alias was set.",
    )  # fmt: skip


def is_pinned(ref: Ref) -> bool:
    """Whether it names a version by digest alone, so that no alias has to be looked up."""
    return ref.digest is not None and ref.alias is None


def _resolve_one(loader: Loader, ref: Ref, tenant: str, wanted: Callable[[], bool]) -> Resolved:
    if not wanted():
        raise error(Code.LEASE_CANCELLED, str(ref), "nobody waits for it any more")
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
