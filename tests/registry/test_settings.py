"""Settings come from the environment, and a mistake is a Problem that tells no secret."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from adapterd.loader.errors import Code, Failed
from adapterd.registry.settings import load_settings


def test_defaults_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ADAPTERD_DATA_DIR", raising=False)
    settings = load_settings()
    assert settings.data_dir == tmp_path / ".adapterd"
    assert settings.effective_database_url == f"sqlite:///{tmp_path}/.adapterd/registry.sqlite3"
    assert (settings.blobs, settings.host, settings.port) == ("local", "127.0.0.1", 8347)


def test_environment_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTERD_DATA_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("ADAPTERD_PORT", "9000")
    monkeypatch.setenv("ADAPTERD_URL", "http://elsewhere")  # the command's, not ours
    settings = load_settings(data_dir=tmp_path / "b")
    assert settings.data_dir == tmp_path / "b"
    assert settings.port == 9000
    assert settings.uploads_dir == tmp_path / "b" / "uploads"


@pytest.mark.parametrize("given", ["postgresql://u@h/d", "postgres://u@h/d", "postgresql+psycopg2://u@h/d"])
def test_one_postgres_driver(given: str, tmp_path: Path) -> None:
    assert load_settings(data_dir=tmp_path, database_url=given).database_url == "postgresql+psycopg://u@h/d"


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"database_url": "mysql://u:hunter2@h/d"}, "ADAPTERD_DATABASE_URL"),
        ({"database_url": "hunter2"}, "ADAPTERD_DATABASE_URL"),
        ({"database_url": "sqlite://"}, "ADAPTERD_DATABASE_URL"),
        ({"database_url": "sqlite:///:memory:"}, "ADAPTERD_DATABASE_URL"),
        ({"port": 70000}, "ADAPTERD_PORT"),
        ({"blobs": "hunter2"}, "ADAPTERD_BLOBS"),
        ({"blobs": "s3"}, "settings"),
        ({"s3_secret_access_key": "hunter2"}, "settings"),
        ({"upload_ttl_hours": 0}, "ADAPTERD_UPLOAD_TTL_HOURS"),
    ],
)
def test_mistakes(given: dict[str, object], where: str, tmp_path: Path) -> None:
    with pytest.raises(Failed) as caught:
        load_settings(data_dir=tmp_path, **given)
    assert caught.value.code is Code.SETTINGS_INVALID
    assert caught.value.problem.where == where
    assert "hunter2" not in str(caught.value)


def test_repr_hides_the_secret(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, s3_access_key_id="id", s3_secret_access_key="hunter2")
    assert "hunter2" not in repr(settings)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pwd, "getpwuid", _nobody)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("ADAPTERD_DATA_DIR", raising=False)
    with pytest.raises(Failed) as caught:
        load_settings()
    assert (caught.value.code, caught.value.problem.where) == (Code.SETTINGS_INVALID, "ADAPTERD_DATA_DIR")
    with pytest.raises(Failed) as caught:
        load_settings(data_dir=Path("~/registry"))
    assert caught.value.problem.where == "ADAPTERD_DATA_DIR"
    assert load_settings(data_dir=tmp_path).data_dir == tmp_path


def _nobody(uid: int) -> None:
    raise KeyError(uid)
