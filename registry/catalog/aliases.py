"""Aliases: names that move from version to version, with a history that only grows."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from adapterd.loader.errors import Code, Conflict, error
from adapterd.registry.audit.service import AuditLog
from adapterd.registry.catalog.interfaces import AliasInfo, AliasMove, Page, VersionState
from adapterd.registry.catalog.models import AliasMoveRow, AliasRow, VersionRow
from adapterd.registry.catalog.versions import find_by_digest
from adapterd.registry.database import Clock, Database
from adapterd.registry.errors import missing
from adapterd.registry.tenants.service import TenantService


class AliasChanged(Conflict):
    """The alias does not point where the caller thought; `current` is where, or None."""

    def __init__(self, alias: str, current: str | None) -> None:
        found = error(
            Code.PRECONDITION_FAILED, alias,
            f"the alias points to {current}" if current else "there is no such alias yet",
            "Read the alias again and decide anew.",
        )  # fmt: skip
        super().__init__(found.problem)
        self.current = current


class AliasService:
    """Aliases of all tenants. Callers have checked that the actor may do what they ask for."""

    def __init__(self, db: Database, tenants: TenantService, audit: AuditLog, clock: Clock) -> None:
        self._db = db
        self._tenants = tenants
        self._audit = audit
        self._clock = clock

    def get(self, tenant: str, adapter: str, alias: str) -> AliasInfo:
        """Raises NotFound."""
        with self._db.read() as session:
            row = session.get(AliasRow, (tenant, adapter, alias))
            if row is None:
                raise missing(alias)
            return AliasInfo(row.alias, row.number, row.version_digest)

    def put(self, tenant: str, adapter: str, alias: str, digest: str, *, expected: str | None, actor: str) -> AliasInfo:
        """Point an alias to the version with that digest.

        Args:
            expected: the digest that the alias must point to now; None: it must not exist.

        Raises:
            NotFound: no such version.
            Conflict: PRECONDITION_FAILED (as AliasChanged), VERSION_WITHDRAWN.
        """
        with self._db.write() as session:
            self._tenants.lock(session, tenant)
            row = session.get(AliasRow, (tenant, adapter, alias), populate_existing=True)
            current = row.version_digest if row else None
            if current != expected:
                raise AliasChanged(alias, current)
            version = find_by_digest(session, tenant, adapter, digest)
            if version is None:
                raise missing(digest)
            info = self.point(session, tenant, alias, version, actor=actor)
            self._audit.append(
                session, tenant=tenant, actor=actor, action="alias.move", target=f"{adapter}:{alias}",
                detail={"from": current, "to": digest, "number": info.number},
            )  # fmt: skip
            return info

    def point(self, session: Session, tenant: str, alias: str, version: VersionRow, *, actor: str) -> AliasInfo:
        """Move an alias in the caller's transaction, which holds the tenant's lock; no move, no history.

        Raises:
            Conflict: VERSION_WITHDRAWN.
        """
        if version.state != VersionState.ACTIVE:
            raise error(
                Code.VERSION_WITHDRAWN, f"{version.adapter}/{version.number}",
                f"the version is {version.state}", "Point the alias to an active version, or release this one first.",
            )  # fmt: skip
        row = session.get(AliasRow, (tenant, version.adapter, alias), populate_existing=True)
        if row is None:
            row = AliasRow(tenant=tenant, adapter=version.adapter, alias=alias, number=0, version_digest="", moves=0)
            session.add(row)
        if row.number != version.number:
            row.number, row.version_digest, row.moves = version.number, version.version_digest, row.moves + 1
            session.add(_move(row, self._clock, actor))
            session.flush()
        return AliasInfo(alias, version.number, version.version_digest)

    def history(
        self, tenant: str, adapter: str, alias: str, *, below: int | None = None, limit: int = 100
    ) -> Page[AliasMove]:
        """Where the alias pointed, newest first, from `seq` numbers smaller than `below`. Raises NotFound."""
        query = select(AliasMoveRow).where(
            AliasMoveRow.tenant == tenant, AliasMoveRow.adapter == adapter, AliasMoveRow.alias == alias
        )
        if below is not None:
            query = query.where(AliasMoveRow.seq < below)
        with self._db.read() as session:
            if session.get(AliasRow, (tenant, adapter, alias)) is None:
                raise missing(alias)
            rows = session.scalars(query.order_by(AliasMoveRow.seq.desc()).limit(limit + 1)).all()
        moves = [AliasMove(r.seq, r.number, r.version_digest, r.moved_at, r.moved_by) for r in rows[:limit]]
        return Page(tuple(moves), moves[-1].seq if len(rows) > limit else None)


def _move(row: AliasRow, clock: Clock, actor: str) -> AliasMoveRow:
    return AliasMoveRow(
        tenant=row.tenant, adapter=row.adapter, alias=row.alias, seq=row.moves, number=row.number,
        version_digest=row.version_digest, moved_at=clock(), moved_by=actor,
    )  # fmt: skip
