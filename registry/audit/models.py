"""Tables of the audit log. Triggers of the migration refuse to change or delete an entry."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, String
from sqlalchemy.orm import Mapped, mapped_column

from adapterd.registry.database import Base, UtcDateTime


class AuditChainRow(Base):
    """The end of one tenant's chain: the lock of its writers, and the witness of a cut tail."""

    __tablename__ = "audit_chains"

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    entries: Mapped[int]
    head: Mapped[str] = mapped_column(String(64))


class AuditEntryRow(Base):
    """One entry; `digest` covers all other columns, `prev` is the digest of the entry before it."""

    __tablename__ = "audit_entries"

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    actor: Mapped[str] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(512))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    prev: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64))
