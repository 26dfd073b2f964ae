"""`db init` and what stands behind it, repeated and interrupted."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapterd.loader.errors import Code, Failed, Unavailable
from adapterd.loader.trust.keys import Algorithm, generate_publisher_key
from adapterd.registry import operations
from adapterd.registry.database import Database
from adapterd.registry.services import build_services
from adapterd.registry.settings import Settings, load_settings
from adapterd.registry.tokens.interfaces import Caller, Scope
from fakes.clock import FakeClock


@pytest.fixture
def settings(empty_url: str, tmp_path: Path) -> Settings:
    return load_settings(data_dir=tmp_path / "data", database_url=empty_url)


def authenticate(settings: Settings, token: str, clock: FakeClock) -> Caller:
    db = Database(settings.effective_database_url)
    try:
        return build_services(db, operations.load_token_secret(settings), clock).tokens.authenticate(token)
    finally:
        db.dispose()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_init_makes_everything_once(settings: Settings, clock: FakeClock) -> None:
    first = operations.initialise(settings, clock)
    assert first.operator_token is not None
    caller = authenticate(settings, first.operator_token, clock)
    assert (caller.tenant, caller.scopes) == (None, {Scope.OPERATOR})
    assert mode(settings.data_dir) == 0o700
    assert mode(settings.admission_key_file) == mode(settings.token_secret_file) == 0o600
    key = operations.load_admission_key(settings)
    assert (key.algorithm, key.public.key_id) == (Algorithm.ED25519, first.admission_key_id)
    operations.check(settings)

    second = operations.initialise(settings, clock)
    assert second == operations.Initialised(None, first.admission_key_id, first.database_url)
    assert authenticate(settings, first.operator_token, clock) == caller
    assert {p.name for p in settings.data_dir.iterdir() if not p.name.startswith("registry.sqlite3")} == {
        "admission.key",
        "token.secret",
    }


def test_init_twice_at_once_agrees(settings: Settings, clock: FakeClock) -> None:
    with ThreadPoolExecutor(2) as pool:
        results = [done.result() for done in [pool.submit(operations.initialise, settings, clock) for _ in range(2)]]
    assert results[0].admission_key_id == results[1].admission_key_id
    tokens = [result.operator_token for result in results if result.operator_token]
    assert len(tokens) == 1
    assert authenticate(settings, tokens[0], clock).tenant is None


def test_an_init_that_stopped_half_way_is_finished(settings: Settings, clock: FakeClock) -> None:
    settings.data_dir.mkdir(parents=True)
    settings.token_secret_file.write_text("ab" * 32 + "\n")
    settings.token_secret_file.chmod(0o600)
    assert operations.initialise(settings, clock).operator_token is not None
    assert operations.load_token_secret(settings) == b"\xab" * 32


def test_a_lost_operator_token_can_be_replaced(settings: Settings, clock: FakeClock) -> None:
    operations.initialise(settings, clock)
    assert authenticate(settings, operations.mint_operator_token(settings, clock), clock).tenant is None


def test_check_before_init(settings: Settings) -> None:
    with pytest.raises(Failed) as caught:
        operations.check(settings)
    assert caught.value.code is Code.SETTINGS_INVALID
    assert "adapterctl db init" in caught.value.problem.hint


def test_check_of_a_fresh_database_behind_old_secrets(settings: Settings, clock: FakeClock, tmp_path: Path) -> None:
    operations.initialise(settings, clock)
    other = load_settings(data_dir=settings.data_dir, database_url=f"sqlite:///{tmp_path / 'other.sqlite3'}")
    with pytest.raises(Failed) as caught:
        operations.check(other)
    assert caught.value.code is Code.SCHEMA_OUTDATED
    operations.upgrade(other)
    operations.check(other)


@pytest.mark.parametrize("content", [b"", b"not hex", b"abcd\n", "ü".encode()])
def test_a_broken_token_secret(content: bytes, settings: Settings) -> None:
    settings.data_dir.mkdir(parents=True)
    settings.token_secret_file.touch(0o600)
    settings.token_secret_file.write_bytes(content)
    with pytest.raises(Failed) as caught:
        operations.load_token_secret(settings)
    assert caught.value.code is Code.SETTINGS_INVALID
    assert caught.value.problem.where == str(settings.token_secret_file)


@pytest.mark.parametrize("content", [b"", b"not a key", generate_publisher_key().to_pem()])
def test_a_broken_admission_key(content: bytes, settings: Settings) -> None:
    settings.data_dir.mkdir(parents=True)
    settings.admission_key_file.touch(0o600)
    settings.admission_key_file.write_bytes(content)
    with pytest.raises(Failed) as caught:
        operations.load_admission_key(settings)
    assert caught.value.code is Code.SETTINGS_INVALID


def test_more_than_a_secret_is_refused_and_not_cut(settings: Settings) -> None:
    settings.data_dir.mkdir()
    settings.token_secret_file.touch(0o600)
    settings.token_secret_file.write_text("ab" * (operations.MAX_SECRET_BYTES // 2) + "cd")
    with pytest.raises(Failed) as caught:
        operations.load_token_secret(settings)
    assert caught.value.code is Code.SETTINGS_INVALID
    assert f"more than {operations.MAX_SECRET_BYTES} bytes" in caught.value.problem.message


def test_a_secret_that_others_can_read_is_refused(settings: Settings, clock: FakeClock) -> None:
    operations.initialise(settings, clock)
    settings.admission_key_file.chmod(0o644)
    with pytest.raises(Failed) as caught:
        operations.check(settings)
    assert "chmod 600" in caught.value.problem.hint


def test_a_data_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable) as caught:
        operations.initialise(load_settings(data_dir=tmp_path / "file" / "data"))
    assert caught.value.code is Code.STORAGE_UNAVAILABLE


def test_a_database_that_cannot_be_written_to_is_not_usable(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path / "registry", database_url="")
    operations.initialise(settings)
    file = settings.effective_database_url.removeprefix("sqlite:///")
    read_only = load_settings(data_dir=settings.data_dir, database_url=f"sqlite:///file:{file}?mode=ro&uri=true")
    with pytest.raises(Unavailable) as caught:
        operations.check(read_only)
    assert caught.value.code is Code.DATABASE_UNAVAILABLE
