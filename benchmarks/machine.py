"""What a figure is quoted with: processor, versions, commit, command, load; and how results are stored."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("numpy", "ml-dtypes", "safetensors", "google-re2", "adapterd")


def circumstances(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Everything that a later reader needs to repeat the run."""
    return {
        "command": f"python -m {_module()} {' '.join(sys.argv[1:])}".strip(),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len(_git("status", "--short", "--untracked-files=no").splitlines()),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version(name) for name in packages},
    }


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else sys.argv[0]


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def store(name: str, result: dict[str, Any], table: str) -> None:
    """Write `results/<name>.json` and the table beside it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table)
