"""Validation of a large adapter, against its parts alone; and of hostile files (goals R2 and R3).

    python -m benchmarks.validation --folder /tmp/adapterd-benchmark

Writes benchmarks/results/validation.json and validation.md. Needs 2.5 GB of disk and of free memory for the
page cache. All times of a ratio are taken in turn in one run; a figure is a median.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from benchmarks import hostile
from benchmarks.adapters import write_adapter
from benchmarks.children import command
from benchmarks.machine import circumstances, store

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import examine
from adapterd.loader.formats.files import DirectoryPackage
from adapterd.loader.formats.safetensors_header import read_header
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.registry.admission import digests

GB = 10**9
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
# Rank and dtype; the first is the one of the memory table.
SHAPES = ((64, "BF16"), (16, "BF16"), (32, "F32"))
SIZES = (GB // 4, GB, 2 * GB)
WEIGHTS = "adapter_model.safetensors"

# `examine` with everything that is imported once; prints the seconds of the work alone.
_CHILD = """
import sys, time
from pathlib import Path
from benchmarks.validation import finalize
from adapterd.loader.base_model import BaseSpec
base = BaseSpec.load(Path(sys.argv[2]))
began = time.perf_counter()
finalize(Path(sys.argv[1]), base)
print(time.perf_counter() - began)
"""


def hash_alone(folder: Path) -> None:
    """SHA-256 of the tensor file as the standard library does it."""
    with (folder / WEIGHTS).open("rb") as file:
        hashlib.file_digest(file, "sha256")


def scan_alone(folder: Path) -> None:
    """Every value read and asked whether it is finite, a tensor at a time."""
    with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package:
        reader = package.open(WEIGHTS)
        for tensor in read_header(reader, DEFAULT_LIMITS).tensors:
            values = np.frombuffer(reader.read_at(tensor.begin, tensor.nbytes), DTYPES[tensor.dtype])
            if not np.isfinite(values.astype(np.float32)).all():
                raise SystemExit("the benchmark's own values are not finite")


def finalize(folder: Path, base: BaseSpec) -> None:
    """What an upload's end takes: hashes, both parsers, finite scan, norms."""
    with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package:
        verdict = examine(package, base)
    if verdict.manifest is None or any(m.delta_norm is None for m in verdict.manifest.modules):
        raise SystemExit(f"the benchmark's own adapter is refused: {verdict.problems}")


def service(folder: Path, base: BaseSpec) -> None:
    """What the service takes for the same: it also makes the list of chunk digests, for the workers' sake."""
    with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package:
        hashed = digests(package)
        verdict = examine(package, base, files=hashed.files)
    if verdict.manifest is None or not hashed.chunks:
        raise SystemExit(f"the benchmark's own adapter is refused: {verdict.problems}")


Times = tuple[float, float]
"""Seconds by the clock and of the processor, all threads together."""


def clocked(work: Callable[[], None]) -> Times:
    began, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - busy


def compare(folder: Path, rank: int, dtype: str, total: int, rounds: int) -> dict[str, Any]:
    """The parts alone, the whole, and the whole command, in turn."""
    base = write_adapter(folder, total, rank, dtype)
    table = folder.with_suffix(".json")
    base.save(table)
    work: dict[str, Callable[[], Times]] = {
        "hash": lambda: clocked(lambda: hash_alone(folder)),
        "scan": lambda: clocked(lambda: scan_alone(folder)),
        "finalize": lambda: clocked(lambda: finalize(folder, base)),
        "service": lambda: clocked(lambda: service(folder, base)),
        "verify": lambda: _verify(folder, table),
    }
    hash_alone(folder)  # into the page cache
    times: dict[str, list[Times]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, one in work.items():
            times[name].append(one())
    return _compared(folder, rank, dtype, times)


def _verify(folder: Path, table: Path) -> Times:
    cost = command(["-m", "adapterd.cli", "verify", str(folder), "--base", str(table), "--json"])
    if cost.status or not json.loads(cost.said)["ok"]:
        raise SystemExit(cost.said)
    return cost.seconds, cost.cpu_seconds


def _compared(folder: Path, rank: int, dtype: str, times: dict[str, list[Times]]) -> dict[str, Any]:
    wall = {name: [seconds for seconds, _ in found] for name, found in times.items()}
    # Both sides of a ratio from one round, so that what else the machine does weighs on both.
    ratios = {
        name: statistics.median(
            whole / max(h, s) for whole, h, s in zip(wall[name], wall["hash"], wall["scan"], strict=True)
        )
        for name in ("finalize", "service", "verify")
    }
    return {
        "rank": rank,
        "dtype": dtype,
        "bytes": (folder / WEIGHTS).stat().st_size,
        "seconds": wall,
        "medians": {name: statistics.median(found) for name, found in wall.items()},
        "cpu_medians": {name: statistics.median(cpu for _, cpu in found) for name, found in times.items()},
        "ratios": ratios,
    }


def memory(folder: Path, total: int) -> dict[str, Any]:
    """Peak memory of a process that finalizes an adapter of that size."""
    rank, dtype = SHAPES[0]
    base = write_adapter(folder, total, rank, dtype)
    table = folder.with_suffix(".json")
    base.save(table)
    cost = command(["-c", _CHILD, str(folder), str(table)])
    if cost.status:
        raise SystemExit("the child failed")
    size = (folder / WEIGHTS).stat().st_size
    return {"bytes": size, "seconds": float(cost.said), "peak_bytes": cost.peak_bytes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/adapterd-benchmark"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=2 * GB)
    parser.add_argument("--only", choices=("large", "memory", "hostile"), action="append")
    asked = parser.parse_args()
    wanted = asked.only or ["large", "memory", "hostile"]
    result: dict[str, Any] = {"what": "validation: goals R2 and R3", **circumstances()}
    shutil.rmtree(asked.folder, ignore_errors=True)
    try:
        if "large" in wanted:
            result["large"] = [compare(asked.folder / "a", r, d, asked.bytes, asked.rounds) for r, d in SHAPES]
        if "memory" in wanted:
            result["memory"] = [memory(asked.folder / "a", min(size, asked.bytes)) for size in SIZES]
        if "hostile" in wanted:
            result["hostile"] = hostile.measure(asked.folder / "hostile")
    finally:
        shutil.rmtree(asked.folder, ignore_errors=True)
    table = as_table(result)
    if not asked.only:
        store("validation", result, table)
    print(table)
    return 0


NOTES = (
    "Seconds by the clock (of the processor). Ratios are over the slower of hash and scan alone, by round; goal 1.5.",
    "Finalize: one digest of every byte, both parsers, finite scan, norms. Service: with the list of chunk digests, so",
    "every byte is hashed twice. Verify: the whole command, the start of the interpreter with it.",
)


def as_table(result: dict[str, Any]) -> str:
    """A short page for people."""
    lines = ["# Validation", "", f"`{result['command']}` at commit {result['commit'][:12]}, {result['at']}.", ""]
    load = ", ".join(f"{x:.1f}" for x in result["load_average"])
    lines += [f"{result['processor']}, {result['cores']} cores, load average {load} at the start.", ""]
    if "large" in result:
        whole = ("finalize", "service", "verify")
        head = ["adapter", "hash s", "scan s", *(f"{name} s" for name in whole), *(f"{name} ratio" for name in whole)]
        lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for row in result["large"]:
            m = {name: f"{row['medians'][name]:.2f} ({cpu:.2f})" for name, cpu in row["cpu_medians"].items()}
            cells = [f"{row['bytes'] / GB:.2f} GB, rank {row['rank']}, {row['dtype']}", m["hash"], m["scan"]]
            cells += [m[name] for name in whole] + [f"{row['ratios'][name]:.2f}" for name in whole]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *NOTES, ""]
    if "memory" in result:
        lines += ["| tensor file | peak memory of the process |", "|---|---|"]
        lines += [f"| {m['bytes'] / GB:.2f} GB | {m['peak_bytes'] / 1e6:.0f} MB |" for m in result["memory"]]
        lines.append("")
    if "hostile" in result:
        lines += hostile.as_lines(result["hostile"])
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
