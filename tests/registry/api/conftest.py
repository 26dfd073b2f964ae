"""A whole registry behind its REST surface: two tenants, their keys and tokens, one base model.

SQLite and local blobs unless a test says otherwise (`kind`, `store`).
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from adapterd.loader.trust.keys import PrivateKey, generate_admission_key
from adapterd.registry.api.context import Context
from adapterd.registry.api.lanes import Lanes
from adapterd.registry.api.observe import Observer
from adapterd.registry.app import build_context
from adapterd.registry.blobs.interfaces import BlobStore
from adapterd.registry.blobs.local import LocalBlobs
from adapterd.registry.database import Database
from adapterd.registry.services import Services, build_services
from adapterd.registry.uploads.interfaces import StagingQuota
from adapterd.registry.uploads.staging import StagingArea
from fakes.clock import FakeClock
from fakes.postgres import PostgresServer
from fakes.registry_world import TOKEN_SECRET, Package, Seed, World, make_package, seed_registry


@pytest.fixture
def kind() -> str:
    return "sqlite"


@pytest.fixture
def store() -> str:
    return "local"


@pytest.fixture(scope="session")
def seeded(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seed]:
    """A seeded SQLite file: copying it is faster than seeding each test's own."""
    path = tmp_path_factory.mktemp("seeded") / "registry.sqlite3"
    shutil.copyfile(sqlite_template, path)
    db = Database(f"sqlite:///{path}")
    made = seed_registry(build_services(db, TOKEN_SECRET, FakeClock()))
    db.dispose()
    return path, made


@pytest.fixture
def database_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind == "sqlite":
        path = tmp_path / "registry.sqlite3"
        shutil.copyfile(request.getfixturevalue("seeded")[0], path)
        return f"sqlite:///{path}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.create(request.getfixturevalue("postgres_template")))


@pytest.fixture
def seed(kind: str, services: Services, request: pytest.FixtureRequest) -> Seed:
    """Who can do what in this test's registry."""
    if kind == "sqlite":
        made: Seed = request.getfixturevalue("seeded")[1]
        return made
    return seed_registry(services)


@pytest.fixture
def blobs(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if store == "s3":
        found: BlobStore = request.getfixturevalue("s3_blobs")
        return found
    return LocalBlobs(tmp_path / "blobs")


@pytest.fixture
def staging(tmp_path: Path) -> StagingArea:
    return StagingArea(tmp_path / "uploads")


@pytest.fixture(scope="session")
def admission_key() -> PrivateKey:
    return generate_admission_key()


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def rebuild(
    services: Services,
    blobs: BlobStore,
    staging: StagingArea,
    admission_key: PrivateKey,
    clock: FakeClock,
    log: io.StringIO,
) -> Callable[..., Context]:
    """A context over the same database and disk: a server started again, or one with worse collaborators."""

    def build(**over: object) -> Context:
        parts: dict[str, object] = {
            "blobs": blobs, "staging": staging, "key": admission_key, "observer": Observer(log), "clock": clock,
            "upload_lifetime": timedelta(hours=24), "upload_quota": StagingQuota(), "lanes": Lanes(2),
        }  # fmt: skip
        return build_context(over.pop("services", services), **{**parts, **over})  # type: ignore[arg-type]

    return build


@pytest.fixture
def context(rebuild: Callable[..., Context]) -> Context:
    return rebuild()


@pytest.fixture
def world(context: Context, seed: Seed) -> Iterator[World]:
    made = World(context, seed)
    yield made
    made.close()


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A good adapter for the tiny llama, unsigned."""
    return make_package(tmp_path_factory.mktemp("good"))
