"""The composition root: settings in, a server out, or one clear reason why not."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from adapterd.loader.errors import AdapterdError, Code
from adapterd.registry.app import create_app
from adapterd.registry.operations import initialise
from adapterd.registry.settings import Settings, load_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(data_dir=tmp_path / "registry", database_url="", blobs="local")


def test_an_initialised_registry_serves(settings: Settings) -> None:
    made = initialise(settings)
    log = io.StringIO()
    with TestClient(create_app(settings, log_to=log)) as client:
        client.headers["Authorization"] = f"Bearer {made.operator_token}"
        assert client.get("/readyz").status_code == 200
        assert client.get("/v1/whoami").json()["scopes"] == ["operator"]
        (key,) = client.get("/v1/admission-keys").json()["items"]
        assert key["key_id"] == made.admission_key_id
    assert '"event": "request"' in log.getvalue()


def test_one_that_was_not_initialised_says_what_to_do(settings: Settings) -> None:
    with pytest.raises(AdapterdError) as caught:
        create_app(settings)
    assert caught.value.code is Code.SETTINGS_INVALID
    assert "adapterctl db init" in caught.value.problem.hint


def test_an_empty_database_says_what_to_do(settings: Settings) -> None:
    initialise(settings)
    (settings.data_dir / "registry.sqlite3").unlink()
    with pytest.raises(AdapterdError) as caught:
        create_app(settings)
    assert caught.value.code is Code.SCHEMA_OUTDATED
    assert "adapterctl db" in caught.value.problem.hint
