"""Real databases and a real bucket, shared by all tests of the registry.

Migrations run once a session into a template of each kind; a test gets a copy.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapterd.registry import schema
from adapterd.registry.blobs.interfaces import BlobStore
from adapterd.registry.blobs.local import LocalBlobs
from adapterd.registry.blobs.s3 import S3Blobs, make_client
from adapterd.registry.database import Database
from adapterd.registry.services import Services, build_services
from fakes.clock import FakeClock
from fakes.postgres import PostgresServer
from fakes.s3 import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

TOKEN_SECRET = bytes(range(32))


def migrate(url: str) -> None:
    db = Database(url)
    try:
        schema.upgrade(db)
    finally:
        db.dispose()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    name = postgres.create()
    migrate(postgres.url(name))
    return name


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.sqlite3"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def empty_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database with nothing in it."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path / 'registry.sqlite3'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.create())


@pytest.fixture(scope="session")
def postgres_shared(postgres: PostgresServer, postgres_template: str) -> str:
    return postgres.create(postgres_template)


@pytest.fixture
def database_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a migrated database without rows. Leave its schema alone; `own_database` is for that."""
    if kind == "sqlite":
        path = tmp_path / "registry.sqlite3"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite:///{path}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name: str = request.getfixturevalue("postgres_shared")
    yield server.url(name)
    server.clear(name)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    db = Database(database_url)
    yield db
    db.dispose()


@pytest.fixture
def own_database(empty_url: str) -> Iterator[Database]:
    """A migrated database whose schema the test may change."""
    db = Database(empty_url)
    schema.upgrade(db)
    yield db
    db.dispose()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def services(database: Database, clock: FakeClock) -> Services:
    return build_services(database, TOKEN_SECRET, clock)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_blobs(s3_server: S3Server) -> Iterator[S3Blobs]:
    """An empty bucket."""
    client = make_client(endpoint=s3_server.endpoint, access_key_id=ACCESS_KEY_ID, secret_access_key=SECRET_ACCESS_KEY)
    bucket = f"test-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=bucket)
    blobs = S3Blobs(client, bucket, prefix="registry/")
    yield blobs
    blobs.close()


@pytest.fixture(params=["local", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    """Every implementation of the port."""
    if request.param == "local":
        return LocalBlobs(tmp_path / "blobs")
    store: S3Blobs = request.getfixturevalue("s3_blobs")
    return store


@pytest.fixture
def damage(blobs: BlobStore) -> Callable[[str, str, bytes], None]:
    """Put other bytes under a blob's key, as who owns the disk or the bucket can."""

    def write(tenant: str, sha256: str, data: bytes) -> None:
        if isinstance(blobs, LocalBlobs):
            blobs.path(tenant, sha256).write_bytes(data)
        elif isinstance(blobs, S3Blobs):
            blobs.client.put_object(Bucket=blobs.bucket, Key=blobs.key(tenant, sha256), Body=data)

    return write
