"""The schema: all tables together, and Alembic run in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, text

from adapterd.registry.audit import models as _audit
from adapterd.registry.base_models import models as _base_models
from adapterd.registry.catalog import models as _catalog
from adapterd.registry.database import Base, schema_outdated
from adapterd.registry.keys import models as _keys
from adapterd.registry.tenants import models as _tenants
from adapterd.registry.tokens import models as _tokens
from adapterd.registry.uploads import models as _uploads

if TYPE_CHECKING:
    from adapterd.registry.database import Database

# Importing a domain's models puts its tables into the one metadata.
DOMAINS = (_audit, _base_models, _catalog, _keys, _tenants, _tokens, _uploads)
_UPGRADE_LOCK = 0x61646170  # "adap": one upgrade at a time


def metadata() -> MetaData:
    """All tables of the registry."""
    return Base.metadata


def upgrade(db: Database) -> None:
    """Bring the schema to this program's state, all or nothing; returns at once when it is there.

    Two processes that upgrade together do so one after the other.
    """
    with _alone(db) as config:
        command.upgrade(config, "head")


def downgrade(db: Database, revision: str) -> None:
    """Take the schema back to `revision` (or `base`), all or nothing. The data of what it drops is lost."""
    with _alone(db) as config:
        command.downgrade(config, revision)


def check(db: Database) -> None:
    """Raises Failed (SCHEMA_OUTDATED) unless the schema's revision is this program's newest."""
    wanted = set(ScriptDirectory.from_config(_config()).get_heads())
    with db.read() as session:
        found = set(MigrationContext.configure(session.connection()).get_current_heads())
    if found != wanted:
        shown = ", ".join(sorted(found)) or "empty"
        raise schema_outdated(f"the schema is {shown}, this program needs {', '.join(sorted(wanted))}")


def drift(db: Database) -> list[Any]:
    """How the schema differs from the models, as Alembic's autogenerate sees it; empty when it does not."""
    with db.connection() as connection:
        found: list[Any] = compare_metadata(_context(connection), metadata())
        return found


@contextmanager
def _alone(db: Database) -> Iterator[Config]:
    """Alembic's configuration on a transaction that no other upgrade shares."""
    with db.connection() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
        config = _config()
        config.attributes["connection"] = connection
        yield config


def _context(connection: Connection) -> MigrationContext:
    return MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "adapterd:migrations")
    return config
