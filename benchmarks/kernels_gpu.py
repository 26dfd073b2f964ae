"""The engine's kernels on one card: time over the floor, by linear and workload, in a replayed CUDA graph.

    python -m benchmarks.kernels_gpu --commit "$(git rev-parse HEAD)" --out FILE

What `adapterctl bench kernels` measures, and beside it: with and without programmatic dependent launch, the
batch-invariant mode, the torch reference launched from Python, and what a step costs on the CPU. One step of an engine
runs several layers of the same shape, together more than the L2; a graph of them is captured in the step and replayed.
The floor is the fewest bytes (x of adapted rows, A and B of each adapter once, y read and written) over the rate of a
device-to-device copy in the same run. Every output is compared with the reference's before it is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adapterd.gpu_cache.engine.tuning.machine import machine_at
from adapterd.gpu_cache.engine.tuning.measuring import WrongOutputError, measure
from adapterd.gpu_cache.engine.tuning.timing import copy_rate, events
from adapterd.gpu_cache.engine.tuning.workloads import Workload, workloads
from adapterd.gpu_cache.engine.tuning.world import World

CUDA = "cuda:0"
MODES: Mapping[str, Mapping[str, Any]] = {
    "plain": {"pdl": False},
    "pdl": {"pdl": True},
    "batch_invariant": {"pdl": True, "batch_invariant": True},
}
HEAD = """| workload | floor µs | kernels (×) | with PDL (×) | batch-invariant (×) | reference, eager | step CPU µs | launch CPU µs |
|---|---|---|---|---|---|---|---|"""  # noqa: E501


def measured(workload: Workload, rate: float, tuning: Path | None) -> dict[str, Any]:
    world = World(workload, CUDA)
    wanted = world.once(kernels="reference")
    found: dict[str, Any] = {"workload": workload.name, "sets": world.sets, "floor_us": 1e6 * workload.nbytes() / rate}
    for name, options in MODES.items():
        try:
            found[name] = measure(world, rate, wanted, tuning=tuning, **options).as_json()
        except WrongOutputError as wrong:
            found[name] = {"wrong": str(wrong)}
    with world.engine(kernels="reference") as engine, engine.step(world.rows):
        found["reference_us"] = events(world.model, 2) / world.sets
    return found


def row(found: Mapping[str, Any]) -> str:
    cells = [found["workload"], f"{found['floor_us']:.1f}"]
    for name in MODES:
        one = found[name]
        cells.append("wrong" if "wrong" in one else f"{one['us']:.1f} ({one['ratio']:.2f})")
    cells.append(f"{found['reference_us']:.0f}")
    cells += [f"{found['pdl'].get(name, float('nan')):.0f}" for name in ("step_us", "launch_us")]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only workloads with this in their name")
    parser.add_argument("--tuning", type=Path, help="a table of launch configurations, not the card's own")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    machine = machine_at(CUDA)
    began = time.perf_counter()
    torch.manual_seed(0)
    rate = copy_rate(torch.device(CUDA))
    print(f"{machine.name}, copy {rate / 1e12:.2f} TB/s\n\n{HEAD}", flush=True)
    results = []
    for workload in workloads():
        if arguments.match in workload.name:
            results.append(measured(workload, rate, arguments.tuning))
            print(row(results[-1]), flush=True)
            gc.collect()
    if arguments.out:
        body = {
            "commit": arguments.commit, "machine": machine.as_json(), "copy_bytes_per_second": rate,
            "results": results,
        }  # fmt: skip
        arguments.out.write_text(json.dumps(body, indent=1) + "\n")
    print(f"\n{time.perf_counter() - began:.0f} s")
    return 0 if not any("wrong" in found[name] for found in results for name in MODES) else 1


if __name__ == "__main__":
    sys.exit(main())
