"""These tests need a CUDA device; without one nothing here is collected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.suffix == ".py" and not torch.cuda.is_available() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m gpu` selects them, whatever a module forgets."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
