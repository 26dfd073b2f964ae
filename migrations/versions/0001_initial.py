"""The first schema: tenants, tokens, keys, base models, audit, catalog and uploads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
APPEND_ONLY = ("audit_entries", "alias_moves")
TABLES = (
    "tenants",
    "tokens",
    "publisher_keys",
    "base_models",
    "audit_chains",
    "audit_entries",
    "adapters",
    "versions",
    "version_files",
    "aliases",
    "alias_moves",
    "uploads",
    "upload_files",
)


def upgrade() -> None:
    _create_tenants()
    _create_audit()
    _create_catalog()
    _create_aliases()
    _create_uploads()
    for table in APPEND_ONLY:
        _refuse_changes(table)


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION adapterd_refuse_change()")


def _create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("require_signature", sa.Boolean(), nullable=False),
        sa.Column("allow", sa.JSON(), nullable=False),
        sa.Column("refuse", sa.JSON(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_tenants"),
    )
    op.create_table(
        "tokens",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("id", sa.String(length=10), nullable=False),
        sa.Column("kind", sa.String(length=1), nullable=False),
        sa.Column("mac", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("adapters", sa.JSON(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("created_by", sa.String(length=64), nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("tenant", "id", name="pk_tokens"),
        sa.UniqueConstraint("id", name="uq_tokens_id"),
    )
    op.create_table(
        "publisher_keys",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("public_key_pem", sa.Text(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_publisher_keys_tenant_tenants"),
        sa.PrimaryKeyConstraint("tenant", "key_id", name="pk_publisher_keys"),
        sa.UniqueConstraint("tenant", "name", name="uq_publisher_keys_tenant_name"),
    )
    op.create_table(
        "base_models",
        sa.Column("id", sa.String(length=256), nullable=False),
        sa.Column("revision", sa.String(length=71), nullable=False),
        sa.Column("module_table_digest", sa.String(length=64), nullable=False),
        sa.Column("module_count", sa.Integer(), nullable=False),
        sa.Column("alternatives", sa.JSON(), nullable=False),
        sa.Column("weights_digest", sa.String(length=64), nullable=True),
        sa.Column("table_json", sa.Text(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", "revision", name="pk_base_models"),
    )


def _create_audit() -> None:
    op.create_table(
        "audit_chains",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("entries", sa.Integer(), nullable=False),
        sa.Column("head", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_audit_chains"),
    )
    op.create_table(
        "audit_entries",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=512), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("prev", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "seq", name="pk_audit_entries"),
    )


def _create_catalog() -> None:
    op.create_table(
        "adapters",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_adapters_tenant_tenants"),
        sa.PrimaryKeyConstraint("tenant", "name", name="pk_adapters"),
    )
    op.create_table(
        "versions",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("version_digest", sa.String(length=64), nullable=False),
        sa.Column("base_id", sa.Text(), nullable=False),
        sa.Column("base_revision", sa.String(length=71), nullable=False),
        sa.Column("base_table_digest", sa.String(length=64), nullable=False),
        sa.Column("publisher", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("created_by", sa.String(length=64), nullable=False),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.Column("warnings", sa.Text(), nullable=False),
        sa.Column("statement", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("state in ('active', 'yanked', 'quarantined')", name="ck_versions_state"),
        sa.ForeignKeyConstraint(
            ["tenant", "adapter"],
            ["adapters.tenant", "adapters.name"],
            name="fk_versions_tenant_adapter_adapters",
        ),
        sa.PrimaryKeyConstraint("tenant", "adapter", "number", name="pk_versions"),
        sa.UniqueConstraint("tenant", "adapter", "version_digest", name="uq_versions_digest"),
    )
    op.create_table(
        "version_files",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(length=255), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "adapter", "number"],
            ["versions.tenant", "versions.adapter", "versions.number"],
            name="fk_version_files_tenant_adapter_number_versions",
        ),
        sa.PrimaryKeyConstraint("tenant", "adapter", "number", "path", name="pk_version_files"),
    )


def _create_aliases() -> None:
    op.create_table(
        "aliases",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=False),
        sa.Column("alias", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("version_digest", sa.String(length=64), nullable=False),
        sa.Column("moves", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "adapter", "number"],
            ["versions.tenant", "versions.adapter", "versions.number"],
            name="fk_aliases_tenant_adapter_number_versions",
        ),
        sa.PrimaryKeyConstraint("tenant", "adapter", "alias", name="pk_aliases"),
    )
    op.create_table(
        "alias_moves",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=False),
        sa.Column("alias", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("version_digest", sa.String(length=64), nullable=False),
        sa.Column("moved_at", MOMENT, nullable=False),
        sa.Column("moved_by", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "adapter", "alias", "seq", name="pk_alias_moves"),
    )


def _create_uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=False),
        sa.Column("base_id", sa.Text(), nullable=False),
        sa.Column("base_revision", sa.String(length=71), nullable=False),
        sa.Column("allow", sa.Text(), nullable=False),
        sa.Column("alias", sa.String(length=64), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("problems", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("request_digest", sa.String(length=64), nullable=False),
        sa.Column("created_by", sa.String(length=64), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.CheckConstraint("state in ('open', 'admitted', 'refused')", name="ck_uploads_state"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_uploads_tenant_tenants"),
        sa.PrimaryKeyConstraint("tenant", "id", name="pk_uploads"),
        sa.UniqueConstraint("tenant", "idempotency_key", name="uq_uploads_idempotency"),
    )
    op.create_table(
        "upload_files",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("upload_id", sa.String(length=32), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(length=255), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "upload_id"],
            ["uploads.tenant", "uploads.id"],
            name="fk_upload_files_tenant_upload_id_uploads",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("tenant", "upload_id", "position", name="pk_upload_files"),
    )


def _refuse_changes(table: str) -> None:
    """Make the database itself refuse to change or delete a row of `table`, whoever asks."""
    if op.get_bind().dialect.name == "sqlite":
        for change in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{change.lower()} BEFORE {change} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
        return
    op.execute(
        "CREATE OR REPLACE FUNCTION adapterd_refuse_change() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    for moment, unit in (("UPDATE OR DELETE", "ROW"), ("TRUNCATE", "STATEMENT")):
        op.execute(
            f"CREATE TRIGGER {table}_no_{moment.split()[0].lower()} BEFORE {moment} ON {table} "
            f"FOR EACH {unit} EXECUTE FUNCTION adapterd_refuse_change()"
        )
