"""Table of publisher keys."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from adapterd.registry.database import Base, UtcDateTime
from adapterd.registry.tenants.models import TenantRow


class KeyRow(Base):
    """One public key of a tenant. Never deleted: a revoked key must stay known as revoked."""

    __tablename__ = "publisher_keys"
    __table_args__ = (UniqueConstraint("tenant", "name", name="uq_publisher_keys_tenant_name"),)

    tenant: Mapped[str] = mapped_column(ForeignKey(TenantRow.name), primary_key=True)
    key_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    public_key_pem: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
