"""The database's promises, on every database."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import func, select, text

from adapterd.loader.errors import Code, Conflict, Failed, Unavailable
from adapterd.registry.database import Database
from adapterd.registry.tenants.models import TenantRow
from fakes.clock import FakeClock
from fakes.postgres import PostgresServer

NOW = datetime(2026, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)


def row(name: str, at: datetime = NOW) -> TenantRow:
    return TenantRow(name=name, created_at=at, require_signature=True, allow=[], refuse=[], limits={})


def count(db: Database) -> int:
    with db.read() as session:
        return session.scalar(select(func.count()).select_from(TenantRow)) or 0


def test_a_write_is_whole_or_nothing(database: Database) -> None:
    with database.write() as session:
        session.add(row("kept"))
    with pytest.raises(LookupError), database.write() as session:
        session.add(row("lost"))
        session.flush()
        raise LookupError
    assert count(database) == 1


def test_a_read_session_cannot_write(database: Database) -> None:
    with pytest.raises(RuntimeError), database.read() as session:
        session.add(row("acme"))
        session.flush()
    with database.write() as session:
        session.add(row("acme"))
    with pytest.raises(RuntimeError), database.read() as session:
        session.get_one(TenantRow, "acme").require_signature = False
        session.flush()


def test_a_read_session_sees_one_snapshot(database: Database) -> None:
    with database.read() as session:
        before = session.scalars(select(TenantRow.name)).all()
        with database.write() as writer:
            writer.add(row("acme"))
        assert session.scalars(select(TenantRow.name)).all() == before == []
    assert count(database) == 1


def test_moments_come_back_in_utc(database: Database) -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=5, minutes=30)))
    with database.write() as session:
        session.add(row("acme", elsewhere))
    with database.read() as session:
        found = session.get_one(TenantRow, "acme").created_at
    assert found == NOW
    assert found.tzinfo is UTC


def test_a_moment_needs_a_zone(database: Database) -> None:
    with pytest.raises(Exception, match="needs a time zone"), database.write() as session:
        session.add(row("acme", NOW.replace(tzinfo=None)))
    assert count(database) == 0


def test_a_broken_constraint_is_a_conflict(database: Database) -> None:
    with database.write() as session:
        session.add(row("acme"))
    with pytest.raises(Conflict) as caught, database.write() as session:
        session.add(row("acme"))
    assert caught.value.code is Code.CONFLICT


def test_foreign_keys_hold(database: Database) -> None:
    with pytest.raises(Conflict), database.write() as session:
        session.execute(
            text(
                "INSERT INTO publisher_keys (tenant, key_id, name, public_key_pem, created_at) "
                "VALUES ('nobody', 'k', 'n', 'p', '2026-01-01')"
            )
        )


def test_read_then_write_from_many_threads_loses_nothing(database: Database) -> None:
    """The pattern that a deferred SQLite transaction fails at: read, then write what was read plus one."""
    with database.write() as session:
        session.add(row("acme"))
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(5):
            with database.write() as session:
                query = select(TenantRow).where(TenantRow.name == "acme").with_for_update()
                tenant = session.scalars(query).one()
                tenant.limits = {"n": tenant.limits.get("n", 0) + 1}

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    with database.read() as session:
        assert session.get_one(TenantRow, "acme").limits == {"n": 20}


def test_an_empty_database_is_outdated(empty_url: str) -> None:
    db = Database(empty_url)
    try:
        for attempt in (db.check_schema, lambda: count(db)):
            with pytest.raises(Failed) as caught:
                attempt()
            assert caught.value.code is Code.SCHEMA_OUTDATED
            assert "adapterctl db init" in caught.value.problem.hint
    finally:
        db.dispose()


def test_sqlite_modes(tmp_path: Path) -> None:
    db = Database(f"sqlite:///{tmp_path / 'x.sqlite3'}")
    with db.read() as session:
        modes = {
            name: session.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    db.dispose()
    assert modes == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}


def test_a_full_disk_is_told(sqlite_template: Path, tmp_path: Path) -> None:
    path = tmp_path / "full.sqlite3"
    path.write_bytes(sqlite_template.read_bytes())
    db = Database(f"sqlite:///{path}")
    with pytest.raises(Unavailable) as caught, db.write() as session:
        pages = session.scalar(text("PRAGMA page_count"))
        session.execute(text(f"PRAGMA max_page_count = {pages}"))
        for n in range(200):
            session.add(row(f"tenant-{n}", FakeClock()()))
    assert caught.value.code is Code.STORAGE_FULL
    assert count(db) == 0
    db.dispose()


@pytest.mark.parametrize("where", ["no-such-folder/x.sqlite3", "."])
def test_a_file_that_cannot_be_opened(where: str, tmp_path: Path) -> None:
    db = Database(f"sqlite:///{tmp_path / where}")
    with pytest.raises(Unavailable) as caught:
        count(db)
    assert caught.value.code is Code.DATABASE_UNAVAILABLE


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite3"
    path.write_bytes(b"something else entirely" * 100)
    db = Database(f"sqlite:///{path}")
    with pytest.raises(Unavailable) as caught:
        count(db)
    db.dispose()
    assert caught.value.code is Code.DATABASE_UNAVAILABLE
    assert "not a database" in caught.value.problem.message


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    db = Database(f"postgresql+psycopg://me:hunter2@/d?host={tmp_path}")
    with pytest.raises(Unavailable) as caught:
        count(db)
    assert caught.value.code is Code.DATABASE_UNAVAILABLE
    assert "hunter2" not in str(caught.value)


def test_a_lost_connection_costs_one_error_at_most(postgres: PostgresServer, postgres_template: str) -> None:
    name = postgres.create(postgres_template)
    db = Database(postgres.url(name))
    assert count(db) == 0
    killer = Database(postgres.url(postgres.create()))
    with killer.write() as session:
        session.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"),
            {"name": name},
        )
    killer.dispose()
    assert count(db) == 0  # the pool notices before the query does
    with pytest.raises(Unavailable) as caught, db.read() as session:
        session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    assert caught.value.code is Code.DATABASE_UNAVAILABLE
    db.dispose()
