"""Versions: recording them once, reading them, and taking them out of service."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from sqlalchemy import func, select, tuple_
from sqlalchemy.orm import Session, undefer

from adapterd.loader.errors import Code, Problem, error
from adapterd.loader.identity import SIGNATURE_FILE, BasePin, FileEntry
from adapterd.registry.audit.service import AuditLog
from adapterd.registry.catalog.interfaces import NewVersion, Page, VersionDetail, VersionInfo, VersionState
from adapterd.registry.catalog.models import AdapterRow, VersionFileRow, VersionRow
from adapterd.registry.database import Clock, Database, insert_if_absent
from adapterd.registry.errors import missing
from adapterd.registry.tenants.service import TenantService

DIGEST_PREFIX = "sha256:"

Attest = Callable[[int], bytes]
"""Version number → the signed admission statement."""


class VersionService:
    """Versions of all tenants. Callers have checked that the actor may do what they ask for."""

    def __init__(self, db: Database, tenants: TenantService, audit: AuditLog, clock: Clock) -> None:
        self._db = db
        self._tenants = tenants
        self._audit = audit
        self._clock = clock

    def record(self, session: Session, tenant: str, new: NewVersion, attest: Attest, *, actor: str) -> int:
        """Write a version in the caller's transaction, which holds the tenant's lock.

        The same content for the same base is the same version, however often it is uploaded: then the
        number it has is returned, and nothing is written.

        Raises:
            Conflict: ALREADY_EXISTS when the content is a version for another base.
        """
        known = _same(session, tenant, new.adapter, new.manifest.version_digest, new.base)
        if known is not None:
            return known
        now = self._clock()
        values = {"tenant": tenant, "name": new.adapter, "created_at": now, "updated_at": now}
        insert_if_absent(session, AdapterRow, values)
        number = _next_number(session, tenant, new.adapter)
        row = _row(tenant, number, new, actor)
        row.statement, row.created_at = attest(number), now
        session.add(row)
        session.flush()
        stored = (*new.files, *((new.signature,) if new.signature else ()))
        session.add_all(_file_row(tenant, new.adapter, number, entry) for entry in stored)
        session.get_one(AdapterRow, (tenant, new.adapter)).updated_at = now
        session.flush()
        return number

    def require_room(self, tenant: str, adapter: str, digest: str, base: BasePin) -> None:
        """Raises Conflict (ALREADY_EXISTS) when this content could not be recorded for this base."""
        with self._db.read() as session:
            _same(session, tenant, adapter, digest, base)

    def list(self, tenant: str, adapter: str, *, after: int = 0, limit: int = 100) -> Page[VersionInfo]:
        """The versions after number `after`, oldest first. Raises NotFound for an unknown adapter."""
        query = select(VersionRow).where(VersionRow.tenant == tenant, VersionRow.adapter == adapter)
        query = query.where(VersionRow.number > after).order_by(VersionRow.number).limit(limit + 1)
        with self._db.read() as session:
            if session.get(AdapterRow, (tenant, adapter)) is None:
                raise missing(adapter)
            rows = session.scalars(query).all()
            infos = _infos(session, rows[:limit])
        return Page(tuple(infos), infos[-1].number if len(rows) > limit else None)

    def get(self, tenant: str, adapter: str, version: str) -> VersionDetail:
        """One version by its number or `sha256:` and its digest. Raises NotFound."""
        with self._db.read() as session:
            row = _find(session, tenant, adapter, version, VersionRow.manifest, VersionRow.warnings)
            (info,) = _infos(session, [row])
            warnings = tuple(Problem.from_json(p) for p in json.loads(row.warnings))
            return VersionDetail(info, json.loads(row.manifest), warnings)

    def info(self, tenant: str, adapter: str, version: str) -> VersionInfo:
        """As `get`, without the manifest."""
        with self._db.read() as session:
            (info,) = _infos(session, [_find(session, tenant, adapter, version)])
            return info

    def statement(self, tenant: str, adapter: str, version: str) -> bytes:
        """The signed admission statement. Raises NotFound."""
        with self._db.read() as session:
            return _find(session, tenant, adapter, version, VersionRow.statement).statement

    def set_state(self, tenant: str, adapter: str, version: str, state: VersionState, *, actor: str) -> VersionInfo:
        """Take a version out of service, or put it back; the same again changes nothing. Raises NotFound."""
        with self._db.write() as session:
            self._tenants.lock(session, tenant)
            row = _find(session, tenant, adapter, version)
            if row.state != state:
                before, row.state = row.state, state
                session.flush()
                detail = {"version_digest": row.version_digest, "before": before}
                self._audit.append(
                    session, tenant=tenant, actor=actor, action=f"version.{state}",
                    target=f"{adapter}/{row.number}", detail=detail,
                )  # fmt: skip
            (info,) = _infos(session, [row])
            return info


def find_by_digest(session: Session, tenant: str, adapter: str, digest: str) -> VersionRow | None:
    """The version with that content, or None."""
    query = select(VersionRow).where(
        VersionRow.tenant == tenant, VersionRow.adapter == adapter, VersionRow.version_digest == digest
    )
    return session.scalar(query)


def pin_of(row: VersionRow) -> BasePin:
    """The base pin that a version was admitted for."""
    return BasePin(row.base_id, row.base_revision, row.base_table_digest)


def _find(session: Session, tenant: str, adapter: str, version: str, *columns: object) -> VersionRow:
    """The version by number or digest, with the big columns named. Raises NotFound."""
    query = select(VersionRow).where(VersionRow.tenant == tenant, VersionRow.adapter == adapter)
    if version.startswith(DIGEST_PREFIX):
        query = query.where(VersionRow.version_digest == version.removeprefix(DIGEST_PREFIX))
    else:
        query = query.where(VersionRow.number == _number(version))
    for column in columns:
        query = query.options(undefer(column))  # type: ignore[arg-type]
    row = session.scalar(query)
    if row is None:
        raise missing(version)
    return row


def _number(text: str) -> int:
    """The number as a URL has it; 0, which no version has, for what is not one."""
    plain = text.isascii() and text.isdigit() and len(text) <= 9
    return int(text) if plain else 0


def _same(session: Session, tenant: str, adapter: str, digest: str, base: BasePin) -> int | None:
    """Inside an adapter a digest names one version, so that a pinned reference can mean one thing only."""
    row = find_by_digest(session, tenant, adapter, digest)
    if row is None:
        return None
    if pin_of(row) != base:
        raise error(
            Code.ALREADY_EXISTS, f"{adapter}/{row.number}",
            f"the same files are version {row.number} for {row.base_id}@{row.base_revision}",
            "Publish them for another base under another adapter name.",
        )  # fmt: skip
    return row.number


def _next_number(session: Session, tenant: str, adapter: str) -> int:
    query = select(func.max(VersionRow.number)).where(VersionRow.tenant == tenant, VersionRow.adapter == adapter)
    return (session.scalar(query) or 0) + 1


def _row(tenant: str, number: int, new: NewVersion, actor: str) -> VersionRow:
    return VersionRow(
        tenant=tenant, adapter=new.adapter, number=number, version_digest=new.manifest.version_digest,
        base_id=new.base.id, base_revision=new.base.revision, base_table_digest=new.base.module_table_digest,
        publisher=new.publisher, state=VersionState.ACTIVE, created_by=actor,
        manifest=json.dumps(new.manifest.as_json()), warnings=json.dumps([w.as_json() for w in new.warnings]),
    )  # fmt: skip


def _file_row(tenant: str, adapter: str, number: int, entry: FileEntry) -> VersionFileRow:
    return VersionFileRow(
        tenant=tenant, adapter=adapter, number=number, path=entry.path, sha256=entry.sha256, size=entry.size
    )


def _infos(session: Session, rows: Sequence[VersionRow]) -> list[VersionInfo]:
    """One more statement for the files of all rows together."""
    keys = [(row.tenant, row.adapter, row.number) for row in rows]
    place = tuple_(VersionFileRow.tenant, VersionFileRow.adapter, VersionFileRow.number)
    files: dict[tuple[str, str, int], list[FileEntry]] = {key: [] for key in keys}
    for file in session.scalars(select(VersionFileRow).where(place.in_(keys))):
        files[file.tenant, file.adapter, file.number].append(FileEntry(file.path, file.sha256, file.size))
    return [_info(row, files[key]) for row, key in zip(rows, keys, strict=True)]


def _info(row: VersionRow, files: Iterable[FileEntry]) -> VersionInfo:
    ordered = sorted(files, key=lambda f: f.path.encode())
    return VersionInfo(
        row.tenant, row.adapter, row.number, row.version_digest, pin_of(row),
        tuple(f for f in ordered if f.path != SIGNATURE_FILE),
        next((f for f in ordered if f.path == SIGNATURE_FILE), None),
        row.publisher, VersionState(row.state), row.created_at,
    )  # fmt: skip
