"""`tests/gpu/` and the demo on a CUDA device, with card, versions and commit in one file.

    python -m benchmarks.gpu_acceptance --commit "$(git rev-parse HEAD)" --out benchmarks/results/gpu_acceptance.json

Exit status 1 if a test fails or the demo differs from what it must be. What the tests print is told as it comes, and
FILE is written behind the tests as well, so that a run that is cut short leaves what it had. `--tests PATH` runs some
tests and no demo, e.g. tests/gpu/test_tensor_parallel.py where there are two cards.
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

TESTS = "tests/gpu"
PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "adapterd")


def machine() -> dict[str, Any]:
    """Card, driver-independent facts and versions."""
    return {
        "card": torch.cuda.get_device_name(),
        "cards": torch.cuda.device_count(),
        "capability": torch.cuda.get_device_capability(),
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def demo() -> tuple[int, dict[str, Any]]:
    """Status of `adapterctl demo` on the first card, and what it told."""
    words = [sys.executable, "-m", "adapterd.cli", "demo", "--device", "cuda:0", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout) if done.stdout else {"stderr": done.stderr[-2000:]}
    return done.returncode, {"status": done.returncode, **told}


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
    parser.add_argument("--tests", default=TESTS, metavar="PATH")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "what": "tests/gpu and the demo on CUDA" if arguments.tests == TESTS else f"{arguments.tests} on CUDA",
        "command": f"python -m benchmarks.gpu_acceptance {' '.join(sys.argv[1:])}",
        "commit": arguments.commit,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }
    tests_status, lines = told("-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=15", arguments.tests)
    result["tests"] = {"status": tests_status, "output": lines[-40:]}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    demo_status = 0
    if arguments.tests == TESTS:
        demo_status, result["demo"] = demo()
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"tests: {tests_status}, {lines[-1] if lines else 'nothing printed'}; demo: {demo_status}")
    return int(bool(tests_status or demo_status))


if __name__ == "__main__":
    sys.exit(main())
