"""From references to versions, many at once, in a fixed number of statements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, select, tuple_
from sqlalchemy.orm import Session

from adapterd.loader.errors import AdapterdError, Code, Problem, error
from adapterd.loader.identity import Ref
from adapterd.registry.catalog.interfaces import Pinned, VersionState
from adapterd.registry.catalog.models import AliasRow, VersionRow
from adapterd.registry.catalog.versions import pin_of
from adapterd.registry.database import Database
from adapterd.registry.errors import missing
from adapterd.registry.tokens.interfaces import Caller, Scope

_Place = tuple[str, str, str]  # tenant, adapter, alias or digest


@dataclass(frozen=True, slots=True)
class _Found:
    by_alias: dict[_Place, VersionRow]
    by_digest: dict[_Place, VersionRow]


class Resolver:
    """References of all tenants; one that the caller may not read answers like one that is not there (I9)."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def resolve(self, caller: Caller, texts: Sequence[str]) -> list[Pinned | Problem]:
        """What each reference stands for, in the order given: two statements, however many there are."""
        refs = [_parse(caller, text) for text in texts]
        readable = [ref for ref in refs if isinstance(ref, Ref)]
        with self._db.read() as session:
            found = _Found(_aliases(session, readable), _digests(session, readable))
            return [_pinned(ref, found) if isinstance(ref, Ref) else ref for ref in refs]


def _parse(caller: Caller, text: str) -> Ref | Problem:
    try:
        ref = Ref.parse(text)
    except AdapterdError as caught:
        return caught.problem
    if not caller.allows(ref.tenant, Scope.ADAPTERS_READ, ref.name):
        return missing(text).problem
    return ref


def _pinned(ref: Ref, found: _Found) -> Pinned | Problem:
    try:
        return _choose(ref, found)
    except AdapterdError as caught:
        return caught.problem


def _choose(ref: Ref, found: _Found) -> Pinned:
    alias = ref.wanted_alias
    if alias is None:
        row = found.by_digest.get((ref.tenant, ref.name, ref.digest or ""))
    else:
        row = found.by_alias.get((ref.tenant, ref.name, alias))
    if row is None:
        raise missing(str(ref))
    if ref.digest not in (None, row.version_digest):
        raise error(
            Code.REF_CONFLICT, str(ref), f"the alias {alias} points to sha256:{row.version_digest}",
            "Leave out the alias or the digest.",
        )  # fmt: skip
    if row.state == VersionState.QUARANTINED or (row.state == VersionState.YANKED and ref.digest is None):
        raise error(
            Code.VERSION_WITHDRAWN, str(ref), f"version {row.number} is {row.state}",
            "A yanked version can still be had by its digest; a quarantined one must be released first:"
            " `adapterctl release TENANT/NAME@sha256:…`, with the digest from `adapterctl list TENANT/NAME`.",
        )  # fmt: skip
    return Pinned(row.tenant, row.adapter, row.number, row.version_digest, pin_of(row), VersionState(row.state))


def _aliases(session: Session, refs: Sequence[Ref]) -> dict[_Place, VersionRow]:
    places = {(r.tenant, r.name, r.wanted_alias) for r in refs if r.wanted_alias}
    query = select(AliasRow.alias, VersionRow).join(
        VersionRow,
        and_(
            VersionRow.tenant == AliasRow.tenant,
            VersionRow.adapter == AliasRow.adapter,
            VersionRow.number == AliasRow.number,
        ),
    )
    query = query.where(tuple_(AliasRow.tenant, AliasRow.adapter, AliasRow.alias).in_(places))
    return {(row.tenant, row.adapter, alias): row for alias, row in session.execute(query)}


def _digests(session: Session, refs: Sequence[Ref]) -> dict[_Place, VersionRow]:
    places = {(r.tenant, r.name, r.digest) for r in refs if r.digest}
    query = select(VersionRow).where(
        tuple_(VersionRow.tenant, VersionRow.adapter, VersionRow.version_digest).in_(places)
    )
    # Ascending, so that the newest of equal content is the one that stays.
    return {(r.tenant, r.adapter, r.version_digest): r for r in session.scalars(query.order_by(VersionRow.number))}
