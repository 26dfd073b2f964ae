"""The database behind one door: sessions that read a snapshot, sessions that write, and narrowed errors.

Both databases behave alike: a read session sees one snapshot, a write session is a transaction that
commits as a whole when its block ends and vanishes when the block raises. On SQLite writers queue up at
BEGIN IMMEDIATE; on PostgreSQL they take the row locks that the services ask for (`TenantService.lock`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, DateTime, Dialect, MetaData, TypeDecorator, create_engine, event
from sqlalchemy import exc as sa_exc
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import URL, make_url
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker

from adapterd.loader.errors import AdapterdError, Code, error

Clock = Callable[[], datetime]

SQLITE_BUSY_SECONDS = 30
POOL_SIZE = 10
POOL_OVERFLOW = 60  # together as many as threads that ask (40 of Starlette's, those of `api.lanes`): nobody waits
_SQLITE_FULL = 13  # sqlite3.h: SQLITE_FULL
_TROUBLE = (sa_exc.OperationalError, sa_exc.InterfaceError, sa_exc.InternalError)
_PG_DISK_FULL = "53100"  # PostgreSQL manual, appendix A: disk_full
_PG_UNDEFINED = {"42P01", "42703"}  # undefined_table, undefined_column


def utcnow() -> datetime:
    """The time of day, for composition roots; everything else is handed a `Clock`."""
    return datetime.now(UTC)


class Base(DeclarativeBase):
    """Root of all tables. Constraint names are fixed, so that migrations can name them on both databases."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class UtcDateTime(TypeDecorator[datetime]):
    """A moment. Takes aware datetimes only and gives UTC back, also from SQLite, which stores no zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Raises ValueError for a datetime without a zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a stored moment needs a time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Database:
    """One engine and its two kinds of session. Thread-safe; opens nothing before the first use.

    Args:
        url: `sqlite:///<file>` or `postgresql+psycopg://…`. In-memory SQLite is not served: every
            connection would have a database of its own.

    Raises (from `read`, `write` and `connection`, also for what fails inside their blocks):
        Unavailable: DATABASE_UNAVAILABLE (cannot connect, locked too long, lost), STORAGE_FULL.
        Conflict: CONFLICT, a constraint that a concurrent writer got to first.
        Failed: SCHEMA_OUTDATED, a table or column is not there; REQUEST_INVALID, a value that cannot be stored.
    """

    def __init__(self, url: str) -> None:
        self.url = make_url(url)
        options: dict[str, Any] = {"pool_size": POOL_SIZE, "max_overflow": POOL_OVERFLOW}
        if self.is_sqlite:
            options["connect_args"] = {"timeout": SQLITE_BUSY_SECONDS}
        else:
            options["pool_pre_ping"] = True  # a restarted server costs one round trip, not one failed request
        self._engine = create_engine(self.url, **options)
        reading: dict[str, Any] = {}
        if self.is_sqlite:
            _take_over_transactions(self._engine)
        else:
            # SQLite's readers see one snapshot; this makes PostgreSQL's see one, too.
            reading = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        self._writer = self._engine.execution_options(adapterd_write=True)
        self._read_sessions = sessionmaker(self._engine.execution_options(**reading), class_=_ReadSession)
        self._write_sessions = sessionmaker(self._writer, expire_on_commit=False)

    @property
    def is_sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    @property
    def shown_url(self) -> str:
        """The URL for people and logs, its password hidden."""
        return self.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session over one snapshot; flushing a change in it is a RuntimeError."""
        with self._narrowed(), self._read_sessions() as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session in one transaction: committed when the block ends, rolled back when it raises."""
        with self._narrowed(), self._write_sessions.begin() as session:
            yield session

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A bare connection in one write transaction, for migrations."""
        with self._narrowed(), self._writer.begin() as connection:
            yield connection

    def check_schema(self) -> None:
        """Raises Failed (SCHEMA_OUTDATED) unless the schema is exactly this program's."""
        from adapterd.registry.schema import check

        check(self)

    def dispose(self) -> None:
        """Close all pooled connections. The object may be used again."""
        self._engine.dispose()

    @contextmanager
    def _narrowed(self) -> Iterator[None]:
        try:
            yield
        except sa_exc.IntegrityError as caught:
            raise error(
                Code.CONFLICT, "database", "somebody else changed the same thing at the same time",
                "Look at the current state and try again.",
            ) from caught  # fmt: skip
        except (sa_exc.DataError, UnicodeEncodeError) as caught:
            raise error(
                Code.REQUEST_INVALID, "request", "holds a text or number that cannot be stored",
                "Leave out NUL and half characters.",
            ) from caught  # fmt: skip
        except sa_exc.DBAPIError as caught:
            narrow = _narrow(caught, self.url)
            if narrow is None:
                raise
            raise narrow from caught
        except sa_exc.TimeoutError as caught:
            raise error(Code.DATABASE_UNAVAILABLE, "database", "no free connection within 30 s") from caught


class _ReadSession(Session):
    def flush(self, objects: Any = None) -> None:
        if self.new or self.deleted or any(self.is_modified(o) for o in self.dirty):
            raise RuntimeError("a read session was given something to write")
        super().flush(objects)


def _take_over_transactions(engine: Any) -> None:
    """Send BEGIN ourselves (SQLAlchemy manual, SQLite, "Using SQLAlchemy to emit BEGIN").

    A deferred transaction that reads and then writes fails at once when another writer is about, whatever
    the busy timeout; one that says IMMEDIATE waits its turn.
    """

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        write = connection.get_execution_options().get("adapterd_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _narrow(caught: sa_exc.DBAPIError, url: URL) -> AdapterdError | None:
    """The own error for a driver's, or None for one that is our bug."""
    shown = url.render_as_string(hide_password=True)
    cause = caught.orig
    text = " ".join(str(cause).split())[:300]
    state = getattr(cause, "sqlstate", None)
    if getattr(cause, "sqlite_errorcode", 0) & 0xFF == _SQLITE_FULL or state == _PG_DISK_FULL:
        return error(Code.STORAGE_FULL, "database", f"no space left for {shown}", "Free some space and try again.")
    if state in _PG_UNDEFINED or "no such table" in text or "no such column" in text:
        return schema_outdated(text)
    # A bare DatabaseError is sqlite3's for a file that is damaged, or no database at all.
    if type(caught) is sa_exc.DatabaseError or isinstance(caught, _TROUBLE):
        return error(
            Code.DATABASE_UNAVAILABLE, "database", f"{shown}: {text}",
            "Is the database running and reachable? `adapterctl db init` makes a new one.",
        )  # fmt: skip
    return None


def insert_if_absent(session: Session, table: type[Base], values: dict[str, Any]) -> None:
    """Insert a row unless one with its key is there, without an error and without a race."""
    insert = sqlite_insert if session.get_bind().dialect.name == "sqlite" else pg_insert
    session.execute(insert(table).values(**values).on_conflict_do_nothing())


def schema_outdated(message: str) -> AdapterdError:
    """Failed (SCHEMA_OUTDATED) with the command that cures it."""
    hint = "Run `adapterctl db init` for a new database, `adapterctl db upgrade` for an older one."
    return error(Code.SCHEMA_OUTDATED, "database", message, hint)
