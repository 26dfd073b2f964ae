"""Migrations make exactly the models' tables, on every database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import inspect, text

from adapterd.loader.errors import Code, Failed
from adapterd.registry import schema
from adapterd.registry.audit.models import AuditEntryRow
from adapterd.registry.database import Database
from adapterd.registry.services import Services

OPERATORS = {"base_models", "tenants"}


def test_no_drift(database: Database) -> None:
    assert schema.drift(database) == []


def test_drift_would_be_seen(own_database: Database) -> None:
    with own_database.connection() as connection:
        connection.execute(text("ALTER TABLE tenants ADD COLUMN surplus VARCHAR(3)"))
    assert len(schema.drift(own_database)) == 1


def test_upgrade_again_changes_nothing(database: Database) -> None:
    schema.upgrade(database)
    database.check_schema()


def test_two_upgrades_at_once(empty_url: str) -> None:
    databases = [Database(empty_url) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(schema.upgrade, db) for db in databases]:
            done.result()
    databases[0].check_schema()
    for db in databases:
        db.dispose()


def test_another_revision_is_refused(own_database: Database) -> None:
    with own_database.connection() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'tomorrow'"))
    with pytest.raises(Failed) as caught:
        own_database.check_schema()
    assert caught.value.code is Code.SCHEMA_OUTDATED
    assert "tomorrow" in caught.value.problem.message


def test_down_and_up_again(own_database: Database) -> None:
    schema.downgrade(own_database, "base")
    with own_database.connection() as connection:
        assert inspect(connection).get_table_names() == ["alembic_version"]
    schema.upgrade(own_database)
    assert schema.drift(own_database) == []


def test_of_open_uploads_from_before_nobody_knows_whether_they_stored_anything(own_database: Database) -> None:
    schema.downgrade(own_database, "0001")
    row = {
        "tenant": "acme", "adapter": "a", "base_id": "b", "base_revision": "0" * 40, "allow": "[]", "problems": "[]",
        "request_digest": "0" * 64, "created_by": "me", "created_at": "2026-01-01 00:00:00+00:00",
        "expires_at": "2026-01-02 00:00:00+00:00",
    }  # fmt: skip
    columns = [*row, "id", "state"]
    insert = text(f"INSERT INTO uploads ({', '.join(columns)}) VALUES (:{', :'.join(columns)})")
    tenant = text("INSERT INTO tenants VALUES ('acme', '2026-01-01 00:00:00+00:00', :yes, '[]', '[]', '{}')")
    with own_database.connection() as connection:
        connection.execute(tenant, {"yes": True})
        connection.execute(insert, [{**row, "id": state, "state": state} for state in ("open", "refused")])
    schema.upgrade(own_database)
    assert schema.drift(own_database) == []
    with own_database.read() as session:
        assert dict(session.execute(text("SELECT id, stored FROM uploads")).all()) == {"open": True, "refused": False}


def test_every_key_starts_with_the_tenant() -> None:
    for table in schema.metadata().tables.values():
        if table.name not in OPERATORS:
            assert next(iter(table.primary_key)).name == "tenant", table.name


@pytest.mark.parametrize("change", ["UPDATE audit_entries SET actor = 'me'", "DELETE FROM audit_entries"])
def test_the_database_refuses_to_change_history(change: str, services: Services) -> None:
    services.tenants.create("acme", actor="op")
    with pytest.raises(Exception, match=r"append-only|same thing"), services.db.write() as session:
        session.execute(text(change))
    with services.db.read() as session:
        assert [row.actor for row in session.query(AuditEntryRow)] == ["op"]
