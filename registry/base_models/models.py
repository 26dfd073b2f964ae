"""Table of base models. They belong to the operator, so the key has no tenant."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from adapterd.registry.database import Base, UtcDateTime


class BaseModelRow(Base):
    """One pinned base model; `table_json` is the RFC 8785 form of `BaseSpec.as_json()`."""

    __tablename__ = "base_models"

    id: Mapped[str] = mapped_column(String(256), primary_key=True)
    revision: Mapped[str] = mapped_column(String(71), primary_key=True)
    module_table_digest: Mapped[str] = mapped_column(String(64))
    module_count: Mapped[int]
    alternatives: Mapped[list[str]] = mapped_column(JSON)
    weights_digest: Mapped[str | None] = mapped_column(String(64))
    table_json: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
