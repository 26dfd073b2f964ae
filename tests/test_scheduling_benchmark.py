"""The scheduling simulator runs as its reader would run it, and the rule holds in it, too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRACE = ["--seconds", "2", "--dry-run"]


def test_the_simulation_runs_to_its_end_and_is_the_same_again() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-W", "error", "-m", "benchmarks.scheduling", *TRACE],
            cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    rows = [re.findall(r"(?m)^\| \d.*$", each) for each in said]
    assert rows[0] == rows[1] and len(rows[0]) == 2 * 3 * 4 + 5
    columns = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[0]]
    assert all(int(row[8]) == 0 for row in columns if row[2].startswith("first come"))
    for trace in {(row[0], row[1]) for row in columns}:
        median = {row[2]: float(row[3]) for row in columns if (row[0], row[1]) == trace}
        assert median["selector"] < median["first come"]
