"""The loader's public surface: every promised name is there, and importing it loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

import adapterd.loader


def test_every_public_name_can_be_imported() -> None:
    assert sorted(adapterd.loader.__all__) == sorted(adapterd.loader._ROOM_OF)
    for name in adapterd.loader.__all__:
        assert getattr(adapterd.loader, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = adapterd.loader.nonsense


def test_the_errors_alone_load_nothing_heavy() -> None:
    code = "import sys, adapterd.loader.errors; print(sorted({'httpx', 'numpy', 'torch', 're2'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
