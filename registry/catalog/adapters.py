"""Adapters as they are listed: names, how many versions, where the aliases point."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from adapterd.registry.catalog.interfaces import AdapterInfo, Page
from adapterd.registry.catalog.models import AdapterRow, AliasRow, VersionRow
from adapterd.registry.database import Database
from adapterd.registry.errors import missing


class AdapterService:
    """Adapters of all tenants; they come into being with their first version."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def list(self, tenant: str, *, after: str = "", limit: int = 100) -> Page[AdapterInfo]:
        """The adapters whose names follow `after`, by name; three statements, however many there are."""
        query = select(AdapterRow).where(AdapterRow.tenant == tenant, AdapterRow.name > after)
        with self._db.read() as session:
            rows = session.scalars(query.order_by(AdapterRow.name).limit(limit + 1)).all()
            infos = _infos(session, tenant, rows[:limit])
        return Page(tuple(infos), infos[-1].name if len(rows) > limit else None)

    def get(self, tenant: str, name: str) -> AdapterInfo:
        """Raises NotFound."""
        with self._db.read() as session:
            row = session.get(AdapterRow, (tenant, name))
            if row is None:
                raise missing(name)
            (info,) = _infos(session, tenant, [row])
            return info


def _infos(session: Session, tenant: str, rows: Sequence[AdapterRow]) -> list[AdapterInfo]:
    names = [row.name for row in rows]
    counted = select(VersionRow.adapter, func.count()).where(VersionRow.tenant == tenant, VersionRow.adapter.in_(names))
    counts = {row[0]: row[1] for row in session.execute(counted.group_by(VersionRow.adapter))}
    aliases: dict[str, dict[str, str]] = defaultdict(dict)
    pointing = select(AliasRow).where(AliasRow.tenant == tenant, AliasRow.adapter.in_(names)).order_by(AliasRow.alias)
    for alias in session.scalars(pointing):
        aliases[alias.adapter][alias.alias] = alias.version_digest
    return [AdapterInfo(r.name, counts.get(r.name, 0), r.created_at, r.updated_at, aliases[r.name]) for r in rows]
