"""`tests/gpu/` and the demo on a CUDA device, with card, versions and commit in one file.

    python -m benchmarks.gpu_acceptance --commit "$(git rev-parse HEAD)" --out benchmarks/results/gpu_acceptance.json

Exit status 1 if a test fails or the demo differs from what it must be. What the tests print is told as it comes, and
FILE is written behind the tests as well, so that a run that is cut short leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "adapterd")


def machine() -> dict[str, Any]:
    """Card, driver-independent facts and versions."""
    return {
        "card": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def run(*words: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command of this interpreter."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def told(*words: str) -> tuple[int, list[str]]:
    """Status and lines of a command of this interpreter, each line told as it comes."""
    lines = []
    with subprocess.Popen([sys.executable, "-u", *words], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return process.returncode, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "what": "tests/gpu and the demo on CUDA",
        "command": f"python -m benchmarks.gpu_acceptance {' '.join(sys.argv[1:])}",
        "commit": arguments.commit,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }
    tests_status, lines = told("-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=15", "tests/gpu")
    result["tests"] = {"status": tests_status, "output": lines[-40:]}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    demo_status, demo_output, demo_words = run("-m", "adapterd.cli", "demo", "--device", "cuda:0", "--json")
    result["demo"] = {
        "status": demo_status, **(json.loads(demo_output) if demo_output else {"stderr": demo_words[-2000:]})
    }  # fmt: skip
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"tests: {tests_status}, {lines[-1] if lines else 'nothing printed'}; demo: {demo_status}")
    return int(bool(tests_status or demo_status))


if __name__ == "__main__":
    sys.exit(main())
