"""The cache's figures (goals C1 to C8), each against its peer or limit in the same run.

    python -m benchmarks.cache_gpu --out DIR [--only C1,C3] [--commit HASH] [--device cuda:0]
    python -m benchmarks.cache_gpu --out DIR --device cpu --small      # tries the code; figures mean nothing

Writes DIR/cache_gpu.json and DIR/cache_gpu.md. With `--only` another run's file in DIR is kept and added to, if it
is of the same card and commit. Exit status 1 if a part failed; a goal that is not met is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from benchmarks import (
    cache_beside_decode,
    cache_churn,
    cache_cold,
    cache_headline,
    cache_overcommit,
    cache_pages,
    cache_serving_thread,
    cache_staging,
)
from benchmarks.cache_common import Bench, Part
from benchmarks.cache_worlds import Packages, published

PACKAGES = ("torch", "triton", "cuda-bindings", "transformers", "numpy", "safetensors", "adapterd")
ROTATING = 8
"""Adapters of 84 MB in turn beside decode; three fit."""


def parts_of(bench: Bench) -> dict[str, Callable[[], Part]]:
    """Goal → its measurement, in the order in which they run."""

    @cache
    def packages() -> Packages:
        made = published(bench, bench.pick(ROTATING, 5))
        bench.say(f"{len(made.refs)} packages of {made.pages} pages published")
        return made

    return {
        "C1": lambda: cache_staging.measure(bench),
        "C2": lambda: cache_cold.measure(bench, packages()),
        "C3": lambda: cache_beside_decode.measure(bench, packages()),
        "C4": lambda: cache_serving_thread.measure(bench),
        "C5": lambda: cache_pages.measure(bench),
        "C7": lambda: cache_churn.measure(bench),
        "C6": lambda: cache_overcommit.measure(bench),
        "C8": lambda: cache_headline.measure(bench),
    }


def circumstances(bench: Bench, commit: str) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    card = torch.cuda.get_device_properties(bench.device) if bench.cuda else None
    return {
        "command": f"python -m benchmarks.cache_gpu {' '.join(sys.argv[1:])}",
        "commit": commit,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": card.name if card else "none (the figures mean nothing)",
        "memory_bytes": card.total_memory if card else 0,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "small": bench.small,
        "layers": bench.layers,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def as_table(result: dict[str, Any]) -> str:
    """A page for people."""
    packages = ", ".join(f"{name} {found}" for name, found in result["packages"].items())
    lines = [
        "# The cache on a GPU", "",
        f"`{result['command']}` at commit {result['commit'][:12]}, {result['at']}.", "",
        f"{result['card']}, {result['cores']} cores, CUDA {result['cuda']}, Python {result['python']}; {packages}.", "",
        "| goal | what | figure | goal's limit | met |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for goal in sorted(result["parts"]):
        part = result["parts"][goal]
        lines += [_row(figure, judged=not result["small"]) for figure in part.get("figures", ())]
        if "failed" in part:
            lines.append(f"| {goal} | failed: {part['failed'].splitlines()[-1]} | | | no |")
    lines += ["", *(f"- {note}" for goal in sorted(result["parts"]) for note in result["parts"][goal].get("notes", ()))]
    return "\n".join(lines) + "\n"


def _row(figure: dict[str, Any], *, judged: bool) -> str:
    unit = "" if figure["unit"] == "ratio" else f" {figure['unit']}"
    limits = [f"{sign} {figure[name]:g}" for sign, name in (("≤", "most"), ("≥", "least")) if figure[name] is not None]
    met = {True: "yes", False: "**no**", None: ""}[figure["met"] if judged else None]
    cells = (figure["goal"], figure["what"], f"{figure['value']:.3g}{unit}", " ".join(limits), met)
    return f"| {' | '.join(cells)} |"


def _earlier(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    """Parts of another run into the same file, if it can be held beside this one."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    same = all(found.get(name) == now[name] for name in ("card", "commit", "small", "packages"))
    return found["parts"] if same else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="goals, with commas")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--layers", type=int, default=4, help="of the model of C8")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="where 2 GB of packages go")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="adapterd-cache-", dir=asked.scratch if asked.scratch.is_dir() else None))
    bench = Bench(asked.device, asked.small, scratch, asked.layers)
    result = circumstances(bench, asked.commit)
    wanted = [goal for goal in asked.only.split(",") if goal]
    result["parts"] = _earlier(asked.out / "cache_gpu.json", result) if wanted else {}
    bench.say(f"{result['card']}, {result['cores']} cores")
    try:
        parts = {goal: work for goal, work in parts_of(bench).items() if not wanted or goal in wanted}
        failed = [goal for goal, work in parts.items() if not _ran(bench, asked.out, result, goal, work)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(as_table(result))
    return int(bool(failed))


def _ran(bench: Bench, out: Path, result: dict[str, Any], goal: str, work: Callable[[], Part]) -> bool:
    """One part; what there is so far is stored after each, because a run may be cut off."""
    bench.say(f"{goal} begins")
    began = time.perf_counter()
    try:
        part = work()
        found: dict[str, Any] = {
            "figures": [figure.as_json() for figure in part.figures], "notes": part.notes, "data": part.data,
        }  # fmt: skip
    except (Exception, SystemExit):  # noqa: BLE001 - the other parts are worth having
        found = {"failed": traceback.format_exc()}
        print(found["failed"], file=sys.stderr, flush=True)
    found |= {"seconds": time.perf_counter() - began, "command": result["command"], "at": result["at"]}
    result["parts"][goal] = found
    (out / "cache_gpu.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    (out / "cache_gpu.md").write_text(as_table(result))
    bench.clear()
    bench.say(f"{goal} took {found['seconds']:.1f} s")
    return "failed" not in found


if __name__ == "__main__":
    sys.exit(main())
