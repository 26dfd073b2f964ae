"""Runs `interpreted/` in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_kernels_are_right_in_the_interpreter() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n0", str(HERE / "interpreted")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
