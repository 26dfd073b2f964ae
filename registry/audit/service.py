"""Writing the audit log inside other people's transactions, and checking it.

Each entry names the digest of the one before, so an entry cannot be changed, removed or put in between
without breaking all later ones. Who can write to the whole database can still forge a whole new chain:
keep `ChainReport.head` elsewhere to notice that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from adapterd.registry.audit.interfaces import GENESIS, OPERATOR, AuditEntry, ChainReport
from adapterd.registry.audit.models import AuditChainRow, AuditEntryRow
from adapterd.registry.database import Clock, Database, insert_if_absent

_BATCH = 1000


class AuditLog:
    """All chains."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    def append(
        self,
        session: Session,
        *,
        tenant: str | None,
        actor: str,
        action: str,
        target: str,
        detail: Mapping[str, Any] | None = None,
    ) -> AuditEntry:
        """Add an entry to the tenant's chain (None: the operator's) in the caller's transaction.

        Call it last: it locks the chain until the commit, so that two writers cannot both follow the
        same entry. `detail` must be JSON without integers beyond 2^53.
        """
        chain = self.lock(session, tenant)
        entry = AuditEntry(
            chain.tenant,
            chain.entries + 1,
            self._clock(),
            actor,
            action,
            target,
            dict(detail or {}),
            chain.head,
        )
        session.add(_row(entry))
        chain.entries, chain.head = entry.seq, entry.digest
        session.flush()
        return entry

    def list(self, tenant: str | None, *, after: int = 0, limit: int = 100) -> tuple[AuditEntry, ...]:
        """At most `limit` entries whose `seq` follows `after`, oldest first."""
        with self._db.read() as session:
            return tuple(_entry(row) for row in _rows(session, tenant or OPERATOR, after, limit))

    def verify(self, tenant: str | None) -> ChainReport:
        """Walk the chain from its first entry and say how far it holds."""
        name = tenant or OPERATOR
        with self._db.read() as session:
            chain = session.get(AuditChainRow, name)
            entries, head = (chain.entries, chain.head) if chain else (0, GENESIS)
            report = _walk(_all_rows(session, name))
        if report.ok and (report.entries, report.head) != (entries, head):
            reason = f"the chain ends after {report.entries} entries, its end was written after {entries}"
            return ChainReport(report.entries, report.head, report.entries + 1, reason)
        return report

    @staticmethod
    def lock(session: Session, tenant: str | None) -> AuditChainRow:
        """Hold the chain until the transaction ends; the operator's stands in for a lock on the operator."""
        name = tenant or OPERATOR
        insert_if_absent(session, AuditChainRow, {"tenant": name, "entries": 0, "head": GENESIS})
        query = select(AuditChainRow).where(AuditChainRow.tenant == name)
        return session.scalars(query.with_for_update().execution_options(populate_existing=True)).one()


def _walk(rows: Iterator[AuditEntryRow]) -> ChainReport:
    count, head = 0, GENESIS
    for row in rows:
        entry = _entry(row)
        if entry.seq != count + 1:
            return ChainReport(count, head, count + 1, "an entry is missing")
        if entry.prev != head:
            return ChainReport(count, head, entry.seq, "does not follow the entry before it")
        if entry.digest != row.digest:
            return ChainReport(count, head, entry.seq, "was changed after it was written")
        count, head = entry.seq, entry.digest
    return ChainReport(count, head)


def _all_rows(session: Session, tenant: str) -> Iterator[AuditEntryRow]:
    after = -(1 << 31)  # a forged number below 1 must be seen, too
    while batch := _rows(session, tenant, after, _BATCH):
        yield from batch
        after = batch[-1].seq
        session.expunge_all()


def _rows(session: Session, tenant: str, after: int, limit: int) -> list[AuditEntryRow]:
    query = select(AuditEntryRow).where(AuditEntryRow.tenant == tenant, AuditEntryRow.seq > after)
    return list(session.scalars(query.order_by(AuditEntryRow.seq).limit(limit)))


def _entry(row: AuditEntryRow) -> AuditEntry:
    return AuditEntry(row.tenant, row.seq, row.at, row.actor, row.action, row.target, row.detail, row.prev)


def _row(entry: AuditEntry) -> AuditEntryRow:
    return AuditEntryRow(
        tenant=entry.tenant, seq=entry.seq, at=entry.at, actor=entry.actor, action=entry.action,
        target=entry.target, detail=dict(entry.detail), prev=entry.prev, digest=entry.digest,
    )  # fmt: skip
