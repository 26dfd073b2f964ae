"""Table of tenants."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, String
from sqlalchemy.orm import Mapped, mapped_column

from adapterd.registry.database import Base, UtcDateTime


class TenantRow(Base):
    """One tenant and its policy. `allow` and `refuse` hold problem codes, `limits` what overrides the default ones."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    require_signature: Mapped[bool]
    allow: Mapped[list[str]] = mapped_column(JSON)
    refuse: Mapped[list[str]] = mapped_column(JSON)
    limits: Mapped[dict[str, Any]] = mapped_column(JSON)
