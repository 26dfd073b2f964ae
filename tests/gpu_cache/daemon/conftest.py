from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.daemon_world import DaemonWorld


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def world(folder: Path) -> Iterator[DaemonWorld]:
    with DaemonWorld(folder) as world:
        yield world
