"""E7: k adapters on each row, weighted, beside one adapter of the summed rank; on one card, in a replayed CUDA graph.

    python -m benchmarks.compositions --commit "$(git rev-parse HEAD)"
    python -m benchmarks.compositions --match "q T64" --dry-run

Writes results/compositions.json and compositions.md; half a minute.

Both sides read the same bytes: k · rank rows of A and B for each row of the step, each row's its own. They are steps of
two engines in one process, captured each in a graph over layers that are together more than the L2, and replayed in
turn; a ratio is the median of pairs. Before anything is timed, the first layer's output is compared with float64.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from benchmarks.machine import store
from torch import Tensor

from adapterd.gpu_cache.engine.device_plan import Regime
from adapterd.gpu_cache.engine.kernels.launch import shared_memory_of
from adapterd.gpu_cache.engine.kernels.tuned import configs_for
from adapterd.gpu_cache.engine.reference import delta
from adapterd.gpu_cache.engine.tables import ResidentTable
from adapterd.gpu_cache.engine.tuning.cases import Case
from adapterd.gpu_cache.engine.tuning.compiling import Compilers, compilers, jobs_of
from adapterd.gpu_cache.engine.tuning.machine import Machine, machine_at
from adapterd.gpu_cache.engine.tuning.stand import agrees
from adapterd.gpu_cache.engine.tuning.timing import captured, copy_rate, median, replayed_in_turn
from adapterd.gpu_cache.engine.tuning.workloads import ITEM_BYTES, LLAMA_8B, Workload
from adapterd.gpu_cache.engine.tuning.world import World
from adapterd.loader.scratch import scratch_folder

CUDA = "cuda:0"
ROWS, RANKS, SIZES = 64, (16, 32), (2, 3, 4)
REPEATS = 31
HEAD = """| workload | floor µs | k adapters µs | one of the summed rank µs | k adapters over one | off float64 |
|---|---|---|---|---|---|"""


def pairs() -> list[tuple[Workload, Workload]]:
    """(a composition on each row, one adapter of the summed rank on each row)."""
    return [
        (Workload(linear, ROWS, "distinct", rank, size), Workload(linear, ROWS, "distinct", rank * size))
        for linear in LLAMA_8B
        for rank in RANKS
        for size in SIZES
    ]


def float64_of(world: World) -> Tensor:
    """The first layer's output from zero, fp64."""
    layer, widths, arena = world.model.layers()[0], world.workload.linear, world.cache.arena
    total, row = torch.zeros(layer.y.shape, dtype=torch.float64, device=layer.y.device), 0
    for lease, count in world.rows:
        tables = [(ResidentTable(resident, frozenset()), weight) for resident, weight in lease.composition]
        column = 0
        for index, width in enumerate(widths.parts):
            terms = [found for table, weight in tables if (found := table.term(f"0.p{index}", weight, arena))]
            part = delta(layer.x[row : row + count], terms, dtype=torch.float64, batch_invariant=False)
            total[row : row + count, column : column + width] = part
            column += width
        row += count
    return total


def checked(world: World) -> float:
    """How far the output of the step that is open is from float64, relative.

    Raises:
        SystemExit: too far.
    """
    world.zero()
    world.model()
    wanted, got = float64_of(world), world.model.layers()[0].y.double()
    off = float((got - wanted).norm() / wanted.norm())
    if not agrees(got, wanted):
        raise SystemExit(f"{world.workload.name}: off by {off:.2g} of float64")
    return off


def measured(pair: tuple[Workload, Workload], rate: float) -> dict[str, Any]:
    worlds, offs, graphs = [World(workload, CUDA) for workload in pair], [], []
    with ExitStack() as stack:
        for world in worlds:
            engine = stack.enter_context(world.engine(kernels="triton", strict=True))
            stack.enter_context(engine.step(world.rows))
            offs.append(checked(world))
            graphs.append(captured(world.model))
        times = replayed_in_turn(graphs, REPEATS)
    composed, alone = ([us / world.sets for us in side] for side, world in zip(times, worlds, strict=True))
    ratio = median([a / b for a, b in zip(composed, alone, strict=True)])
    return {
        "workload": pair[0].name, "alone": pair[1].name, "floor_us": 1e6 * pair[0].nbytes() / rate,
        "composed_us": median(composed), "alone_us": median(alone), "ratio": ratio, "error": max(offs),
    }  # fmt: skip


def compile_ahead(pool: Compilers, machine: Machine, every: Sequence[tuple[Workload, Workload]]) -> None:
    """What the steps will launch, in many processes; what is not met by it is compiled when it is launched."""
    configs, room = configs_for(machine.name), shared_memory_of(torch.device(CUDA))
    for workload in (one for pair in every for one in pair):
        case = Case(workload, Regime.ROWS)
        launch = case.launch(configs.rows(case.key, ITEM_BYTES), pdl=machine.pdl, shared_memory=room)
        pool.submit(jobs_of(launch, case.regime))


def row(found: Mapping[str, Any]) -> str:
    times = " | ".join(f"{found[name]:.1f}" for name in ("floor_us", "composed_us", "alone_us"))
    return f"| {found['workload']} | {times} | {found['ratio']:.3f} | {found['error']:.1e} |"


def table(facts: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    ratios = [one["ratio"] for one in found]
    return "\n".join(
        [
            "# Compositions beside one adapter of the summed rank",
            "",
            f"{facts['card']}, torch {facts['torch']}, Triton {facts['triton']}, commit {facts['commit']}.",
            "µs a linear in a replayed CUDA graph. Every row of the step has adapters of its own.",
            f"Goal E7: k adapters cost what one of the summed rank costs. Measured: {median(ratios):.3f} of it in the",
            f"median, {min(ratios):.3f} at least, {max(ratios):.3f} at most.",
            "",
            HEAD,
            *map(row, found),
            "",
        ]
    )


def results(machine: Machine, every: Sequence[tuple[Workload, Workload]]) -> Iterator[dict[str, Any]]:
    rate = copy_rate(torch.device(CUDA))
    print(f"{machine.name}, copy {rate / 1e12:.2f} TB/s\n\n{HEAD}", flush=True)
    with scratch_folder("compositions") as folder, compilers(machine.target, folder) as pool:
        compile_ahead(pool, machine, every)
        for pair in every:
            found = measured(pair, rate)
            print(row(found), flush=True)
            yield found
            gc.collect()  # this pair's gigabytes, before the next one's


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only workloads with this in their name")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    arguments = parser.parse_args()
    machine = machine_at(CUDA)
    torch.manual_seed(0)
    every = [pair for pair in pairs() if arguments.match in pair[0].name]
    found = list(results(machine, every))
    facts = {"commit": arguments.commit, **machine.as_json()}
    if not arguments.dry_run:
        store("compositions", {**facts, "results": found}, table(facts, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
