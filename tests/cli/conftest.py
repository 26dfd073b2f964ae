"""A shell, a package and its base, for all commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.commands import Commands
from fakes.packages import tiny_llama_spec, write_package


@pytest.fixture
def shell(tmp_path: Path) -> Commands:
    home = tmp_path / "home"
    home.mkdir()
    return Commands(home)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "package").directory


@pytest.fixture
def base_file(tmp_path: Path) -> Path:
    path = tmp_path / "base.json"
    tiny_llama_spec().save(path)
    return path


@pytest.fixture
def key(tmp_path: Path, shell: Commands) -> Path:
    path = tmp_path / "publisher.pem"
    assert shell.run("keygen", path).exit_code == 0
    return path
