"""Rows of upload sessions. Offsets are not here: the length of the staged file is the offset."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    String,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import Mapped, mapped_column

from adapterd.registry.database import Base, UtcDateTime
from adapterd.registry.tenants.models import TenantRow


class UploadRow(Base):
    """One upload session. `problems` and `allow` are JSON arrays; `stored`, whether any of its blobs may be."""

    __tablename__ = "uploads"
    __table_args__ = (
        UniqueConstraint("tenant", "idempotency_key", name="uq_uploads_idempotency"),
        CheckConstraint("state in ('open', 'admitted', 'refused')", name="state"),
    )

    tenant: Mapped[str] = mapped_column(ForeignKey(TenantRow.name), primary_key=True)
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(64))
    base_id: Mapped[str] = mapped_column(Text)
    base_revision: Mapped[str] = mapped_column(String(71))
    allow: Mapped[str] = mapped_column(Text)
    alias: Mapped[str | None] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    problems: Mapped[str] = mapped_column(Text)
    number: Mapped[int | None] = mapped_column(Integer)
    stored: Mapped[bool] = mapped_column(Boolean, server_default=false())
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    request_digest: Mapped[str] = mapped_column(String(64))
    created_by: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class UploadFileRow(Base):
    """One declared file. Its bytes are staged under `position`, never under its name."""

    __tablename__ = "upload_files"
    __table_args__ = (
        ForeignKeyConstraint(["tenant", "upload_id"], ["uploads.tenant", "uploads.id"], ondelete="CASCADE"),
    )

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    upload_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    path: Mapped[str] = mapped_column(String(255))
    size: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
