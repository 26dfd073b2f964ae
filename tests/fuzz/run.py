"""Fuzz one target, or all of them.

    PYTHONPATH=tests python -m fuzz.run --target header --runs 200000 --seed 1

Half of the runs are mutations guided by coverage (atheris, where it is installed; else plain mutations), the
other half is drawn from the target's grammar. Prints the seed and the counts; exit status 1 for anything that
is not a verdict: another exception, a broken promise, an input that takes seconds or memory that grows. The
input is then kept under build/fuzz/, for tests/fuzz/attacks/. Each part runs in a process of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import multiprocessing
import os
import secrets
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fuzz.engine import Report, run_grammar, run_mutations
from fuzz.target import names, target

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "fuzz"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=names(), action="append", help="repeatable; all of them by default")
    parser.add_argument("--runs", type=int, default=2000, help="of each target")
    parser.add_argument("--seed", type=int, help="made up and printed by default")
    parser.add_argument("--no-atheris", action="store_true", help="plain mutations, even where atheris is installed")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    asked = parser.parse_args(arguments)
    seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
    guided = not asked.no_atheris and importlib.util.find_spec("atheris") is not None
    shards = [shard for name in asked.target or names() for shard in _shards(name, asked.runs, seed, guided)]
    failed = False
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, context, max_tasks_per_child=1) as pool:
        for report in pool.map(fuzz, shards):
            print(told(report), flush=True)
            failed |= bool(report.failure)
    return int(failed)


@dataclass(frozen=True)
class Shard:
    """Runs of one process. `engine`: grammar, coverage or mutations."""

    target: str
    engine: str
    runs: int
    seed: int


def _shards(name: str, runs: int, seed: int, guided: bool) -> list[Shard]:
    """Half of the runs to mutations, which are fast, and a quarter each to two shards of the grammar."""
    quarter = runs // 4
    mutations = Shard(name, "coverage" if guided else "mutations", runs - 2 * quarter, seed)
    return [Shard(name, "grammar", quarter, seed), Shard(name, "grammar", quarter, seed + 1), mutations]


def fuzz(shard: Shard) -> Report:
    """Run one shard."""
    if shard.engine == "coverage":
        return run_guided(shard.target, shard.runs, shard.seed)
    run = run_grammar if shard.engine == "grammar" else run_mutations
    return run(target(shard.target), shard.runs, shard.seed)


def run_guided(name: str, runs: int, seed: int) -> Report:
    """`fuzz.coverage` in a process of its own; a process that dies without a report is a finding, too."""
    with tempfile.TemporaryDirectory(prefix="adapterd-fuzz-") as scratch:
        out = Path(scratch, "report.json")
        command = [sys.executable, "-m", "fuzz.coverage", "--target", name, "--runs", str(runs)]
        command += ["--seed", str(seed), "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
        if out.exists():
            return Report.from_text(out.read_text())
        return Report(name, seed, "coverage", failure=f"status {done.returncode}: {done.stderr[-1500:]}")


def told(report: Report) -> str:
    """A few lines for people."""
    head = f"{report.target} ({report.engine}): {report.runs} runs in {report.seconds:.0f} s, seed {report.seed}"
    lines = [head, *(f"  {count:8} {outcome}" for outcome, count in report.outcomes.most_common())]
    lines.append(
        f"  slowest {report.slowest_seconds * 1e3:.1f} ms, {len(report.slowest)} bytes: {report.slowest[:60]!r}"
    )
    lines.append(f"  peak memory grew by {report.growth_bytes / (1 << 20):.1f} MiB")
    if report.failure:
        lines.append(f"  DEFECT {report.failure}\n  kept as {_keep(report)}")
    return "\n".join(lines)


def _keep(report: Report) -> Path:
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{report.target}-{hashlib.sha256(report.failing).hexdigest()[:12]}"
    path.write_bytes(report.failing)
    return path


if __name__ == "__main__":
    sys.exit(main())
