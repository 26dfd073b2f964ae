"""Every example runs as its reader would run it, with warnings as errors, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


def run(path: Path, folder: Path) -> str:
    environment = {"TMPDIR": str(folder), "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert list(folder.iterdir()) == []
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    said = run(path, tmp_path)
    if path.stem == "multi_lora_serving":
        assert "group sizes: {'base': 2, 'code': 2, 'finance': 2}" in said
        assert "parameters per adapter: {'finance': 26, 'code': 26}, the full weight: 40" in said
