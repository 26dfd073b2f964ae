"""A real PostgreSQL server for one test session: a Unix socket in a private folder, no port, no durability.

Binaries come from $PG_BINDIR, else from the newest /usr/lib/postgresql/*/bin. Missing binaries are an
error and never a skip: a suite that did not run on PostgreSQL must not look green.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import sql

_OPTIONS = "-c listen_addresses= -c fsync=off -c synchronous_commit=off -c full_page_writes=off"


class PostgresServer:
    """Context manager of a running server. `url(name)` is SQLAlchemy's for one of its databases."""

    def __init__(self) -> None:
        self._bin = _bin_dir()
        self._user = _unprivileged_user()
        self._made = 0

    def __enter__(self) -> Self:
        # Short on purpose: a Unix socket's path has at most 107 bytes.
        self._home = Path(tempfile.mkdtemp(prefix="pg-"))
        try:
            if self._user is not None:
                os.chown(self._home, self._user.pw_uid, self._user.pw_gid)
            data = str(self._home / "data")
            self._run("initdb", "-D", data, "-U", "registry", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
            options = f"-k {self._home} {_OPTIONS}"
            # -w: returns when the server answers.
            self._run("pg_ctl", "-D", data, "-w", "-t", "60", "-l", str(self._home / "log"), "-o", options, "start")
        except BaseException:
            shutil.rmtree(self._home, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run("pg_ctl", "-D", str(self._home / "data"), "-w", "-m", "immediate", "stop")
        shutil.rmtree(self._home)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://registry@/{database}?host={self._home}"

    def create(self, template: str = "template0") -> str:
        """A new database as a copy of `template`, to which nobody may be connected; its name."""
        self._made += 1
        name = f"test_{self._made}"
        with self._connect("postgres") as admin:
            admin.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy").format(
                    sql.Identifier(name), sql.Identifier(template)
                )
            )
        return name

    def clear(self, database: str, keep: str = "alembic_version") -> None:
        """Empty all tables but `keep`: much cheaper than a copy of eight megabytes."""
        with self._connect(database) as admin:
            # As a replica the server runs no triggers, so history can be forgotten; only a superuser may.
            admin.execute("SET session_replication_role = replica")
            admin.execute("SET lock_timeout = '10s'")
            query = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> %s"
            tables = [sql.Identifier(name) for (name,) in admin.execute(query, (keep,))]
            admin.execute(sql.SQL("TRUNCATE {} CASCADE").format(sql.SQL(", ").join(tables)))

    def _connect(self, database: str) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(dbname=database, user="registry", host=str(self._home), autocommit=True)

    def _run(self, program: str, *arguments: str) -> None:
        who: dict[str, object] = {}
        if self._user is not None:
            who = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            check=False, **who,  # type: ignore[call-overload]
        )  # fmt: skip
        if done.returncode:
            log = self._home / "log"
            raise RuntimeError(f"{program} failed: {done.stderr}{log.read_text() if log.exists() else ''}")


def _bin_dir() -> Path:
    given = os.environ.get("PG_BINDIR")
    candidates = [Path(given)] if given else sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version)
    for folder in reversed(candidates):
        if (folder / "initdb").exists() and (folder / "pg_ctl").exists():
            return folder
    raise RuntimeError("no PostgreSQL server: set PG_BINDIR, or install it (Debian: apt-get install postgresql)")


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in folder.parent.name.split(".") if part.isdigit())


def _unprivileged_user() -> pwd.struct_passwd | None:
    """Who the server runs as: ourselves, unless we are root, whom it refuses."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    return known.get("postgres") or known["nobody"]
