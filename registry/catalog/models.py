"""Rows of the catalog. Every key starts with the tenant (I9)."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, mapped_column

from adapterd.registry.database import Base, UtcDateTime
from adapterd.registry.tenants.models import TenantRow


class AdapterRow(Base):
    """A name inside a tenant; made with its first version."""

    __tablename__ = "adapters"

    tenant: Mapped[str] = mapped_column(ForeignKey(TenantRow.name), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)


class VersionRow(Base):
    """One admitted version; only `state` ever changes. Written last in an upload (I23)."""

    __tablename__ = "versions"
    __table_args__ = (
        ForeignKeyConstraint(["tenant", "adapter"], ["adapters.tenant", "adapters.name"]),
        UniqueConstraint("tenant", "adapter", "version_digest", name="uq_versions_digest"),
        CheckConstraint("state in ('active', 'yanked', 'quarantined')", name="state"),
    )  # fmt: skip

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    version_digest: Mapped[str] = mapped_column(String(64))
    base_id: Mapped[str] = mapped_column(Text)
    base_revision: Mapped[str] = mapped_column(String(71))
    base_table_digest: Mapped[str] = mapped_column(String(64))
    publisher: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(String(64))
    manifest: Mapped[str] = mapped_column(Text, deferred=True)
    warnings: Mapped[str] = mapped_column(Text, deferred=True)
    statement: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)


class VersionFileRow(Base):
    """One stored file of a version, `model.sig` included; its bytes are the tenant's blob `sha256`."""

    __tablename__ = "version_files"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant", "adapter", "number"], ["versions.tenant", "versions.adapter", "versions.number"]
        ),
        Index(None, "tenant", "sha256"),
    )

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    path: Mapped[str] = mapped_column(String(255), primary_key=True)
    sha256: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)


class AliasRow(Base):
    """Where an alias points now."""

    __tablename__ = "aliases"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant", "adapter", "number"], ["versions.tenant", "versions.adapter", "versions.number"]
        ),
    )

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(64), primary_key=True)
    alias: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(Integer)
    version_digest: Mapped[str] = mapped_column(String(64))
    moves: Mapped[int] = mapped_column(Integer)


class AliasMoveRow(Base):
    """One move of an alias; appended, never changed."""

    __tablename__ = "alias_moves"

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(64), primary_key=True)
    alias: Mapped[str] = mapped_column(String(64), primary_key=True)
    seq: Mapped[int] = mapped_column(Integer, primary_key=True)
    number: Mapped[int] = mapped_column(Integer)
    version_digest: Mapped[str] = mapped_column(String(64))
    moved_at: Mapped[datetime] = mapped_column(UtcDateTime)
    moved_by: Mapped[str] = mapped_column(String(64))
