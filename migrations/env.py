"""Alembic's entry: runs on the connection that `adapterd.registry.schema` hands over.

There is no alembic.ini and no second way to find a database: `adapterctl db upgrade` is the door.
"""

from __future__ import annotations

from alembic import context

from adapterd.registry.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata(),
    compare_type=True,
    compare_server_default=True,
    # SQLite's DDL is transactional once BEGIN is sent by hand, as `Database` does.
    transactional_ddl=True,
    # SQLite alters a table by rebuilding it.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
