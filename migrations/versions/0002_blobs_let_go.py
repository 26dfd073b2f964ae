"""Whose blobs may be let go of when an upload is closed: which uploads stored any, and which versions have one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

INDEX = "ix_version_files_tenant_sha256"


def upgrade() -> None:
    op.create_index(INDEX, "version_files", ["tenant", "sha256"])
    op.add_column("uploads", sa.Column("stored", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.execute("UPDATE uploads SET stored = true WHERE state = 'open'")  # nobody knows of these


def downgrade() -> None:
    op.drop_column("uploads", "stored")
    op.drop_index(INDEX, "version_files")
