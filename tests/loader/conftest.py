"""A worker's store and the registry behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.store_world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path)
