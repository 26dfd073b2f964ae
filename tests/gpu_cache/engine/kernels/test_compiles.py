"""The kernels compile for cards that are not here, and hold what they work on in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SPILLS = {
    ("expand_rows", "mixed"): 1024,
    ("expand_rows", "r64"): 512,
    ("expand_tiles", "prefill r64"): 512,
    ("expand_tiles", "wide"): 512,
    ("shrink_tiles", "shared r128"): 16,
    ("shrink_tiles", "wide"): 640,
}
"""Bytes a thread, where 64 and 128 lanes of B stand in registers at once."""
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("capability", [80, 90, pytest.param(86, marks=pytest.mark.slow)])
def test_every_kernel_compiles_within_its_registers(capability: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiling.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 28
    for report in reports:
        assert report["spills"] <= SPILLS.get((report["kernel"], report["shape"]), 0), report
        assert report["shared"] <= SHARED_MEMORY[capability], report
        assert report["ahead"] in wide_loads_ahead(report, capability), report


def wide_loads_ahead(report: dict[str, Any], capability: int) -> range:
    """How many of them a kernel may have before it waits for the one in front of it.

    None in `shrink`: x may be what that kernel writes. `expand` reads B and y, row by row: `shrink` has waited.
    """
    if capability < 90:
        return range(-1, 0)  # it waits for nothing
    fetches = report["kernel"] == "expand_rows" and report["form"] != "odd"
    return range(1, 65) if fetches else range(1)
