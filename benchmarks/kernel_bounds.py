"""What two dependent kernels can do at best: empty ones, and ones that only move a workload's bytes; on one card.

    python -m benchmarks.kernel_bounds --commit "$(git rev-parse HEAD)"

Writes results/kernel_bounds.json and kernel_bounds.md; half a minute.

A linear's delta is two kernels, since the second needs all of K summed. For each workload, in a replayed CUDA graph:
`empty` is a pair that does nothing, with the grids that the engine launches; `bytes` is a pair of which the first reads
x and A and writes a number a program, and the second reads B and reads and writes y, each byte once, in whole lines,
with no index, no rank and no product; the best of some block sizes. Both start early, as the engine's do, and B is
read before the wait. `adapterd` is the engine on the workload, in the same process. The floor is the same bytes
at the rate of a copy of 2 GiB.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from benchmarks.machine import store
from torch import Tensor

from adapterd.gpu_cache.engine.device_plan import Regime
from adapterd.gpu_cache.engine.kernels.launch import shared_memory_of
from adapterd.gpu_cache.engine.kernels.tuned import configs_for
from adapterd.gpu_cache.engine.tuning.cases import Case, Config
from adapterd.gpu_cache.engine.tuning.machine import Machine, machine_at
from adapterd.gpu_cache.engine.tuning.measuring import measure
from adapterd.gpu_cache.engine.tuning.timing import copy_rate, graph_us
from adapterd.gpu_cache.engine.tuning.workloads import ITEM_BYTES, LLAMA_8B, Workload
from adapterd.gpu_cache.engine.tuning.world import ENOUGH, World

CUDA = "cuda:0"
BLOCKS, WARPS = (2048, 4096, 8192, 16384), (4, 8)
Q, QKV, _, DOWN = LLAMA_8B
WORKLOADS = (
    Workload(Q, 2048, "requests", 16), Workload(QKV, 2048, "requests", 16), Workload(DOWN, 2048, "requests", 16),
    Workload(Q, 64, "zipf", 64), Workload(Q, 64, "distinct", 16),
)  # fmt: skip
HEAD = """| workload | floor µs | empty | bytes (×) | adapterd (×) | adapterd over bytes |
|---|---|---|---|---|---|"""


@triton.jit
def nothing(PDL: tl.constexpr, SECOND: tl.constexpr):
    """An empty program."""
    if PDL:
        if not SECOND:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def read(source, sums, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A block of `source` a program, and its sum."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < size, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(values.to(tl.float32), 0))


@triton.jit
def read_and_add(y, source, sums, y_size, size, Y_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A block of `y` or of `source` a program; those of y are written again, with a number that was summed before."""
    block = tl.program_id(0)
    if block < Y_PROGRAMS:
        at = block * BLOCK + tl.arange(0, BLOCK)
        if PDL:
            tl.extra.cuda.gdc_wait()
        values = tl.load(y + at, mask=at < y_size, other=0.0)
        total = values.to(tl.float32) + tl.load(sums)
        tl.store(y + at, total.to(y.dtype.element_ty), mask=at < y_size)
    else:
        at = (block - Y_PROGRAMS) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(source + at, mask=at < size, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        tl.store(sums + block, tl.sum(values.to(tl.float32), 0))


@dataclass(frozen=True)
class Buffers:
    """Of one layer: what the first kernel reads (x and A), what the second reads (B) and adds to (y), and sums."""

    first: Tensor
    second: Tensor
    y: Tensor
    sums: Tensor


def buffers_of(workload: Workload) -> list[Buffers]:
    """So many that together they are more than the L2."""
    k, n = workload.linear.in_features, workload.linear.out_features
    ranks = workload.adapters * sum(workload.rank_of(adapter) for adapter in set(workload.rows_of()))
    sizes = (workload.rows * k + ranks * k * len(workload.linear.parts), ranks * n, workload.rows * n)

    def words(size: int) -> Tensor:
        return torch.randn(size, device=CUDA).bfloat16()

    sets = max(2, min(48, -(-ENOUGH // workload.nbytes())))
    most = -(-max(sizes) // min(BLOCKS)) * 2 + 2
    return [
        Buffers(*(words(size) for size in sizes), sums=torch.zeros(most, device=CUDA))  # type: ignore[misc]
        for _ in range(sets)
    ]  # fmt: skip


def launch_bytes(one: Buffers, block: int, warps: int, *, pdl: bool) -> None:
    options: dict[str, Any] = {"num_warps": warps, **({"launch_pdl": True} if pdl else {})}
    grids = [-(-tensor.numel() // block) for tensor in (one.first, one.y, one.second)]
    read[(grids[0],)](one.first, one.sums, one.first.numel(), block, pdl, **options)
    read_and_add[(grids[1] + grids[2],)](
        one.y, one.second, one.sums, one.y.numel(), one.second.numel(), grids[1], block, pdl, **options
    )


def bytes_us(workload: Workload, *, pdl: bool) -> tuple[float, tuple[int, int]]:
    """(µs of a pair, its block and warps) of the best."""
    every = buffers_of(workload)

    def timed(block: int, warps: int) -> float:
        def pairs() -> None:
            for one in every:
                launch_bytes(one, block, warps, pdl=pdl)

        return replayed(pairs, len(every))

    return min((timed(*pair), pair) for pair in product(BLOCKS, WARPS))


def empty_us(workload: Workload, machine: Machine) -> float:
    """Of a pair with the grids of the engine's."""
    regime = Regime.ROWS if workload.rows <= 64 else Regime.TILES
    case, configs = Case(workload, regime), configs_for(machine.name)
    if regime is Regime.ROWS:
        config: Config = configs.rows(case.key, ITEM_BYTES)
    else:
        config = configs.tiles(case.key, ITEM_BYTES, batch_invariant=False)
    launch = case.launch(config, pdl=machine.pdl, shared_memory=shared_memory_of(torch.device(CUDA)))
    shrink, expand = launch.shrink_grid, launch.expand_grid
    if regime is Regime.TILES:  # a case has room for a tile a row
        tiles = sum(-(-count // case.tile_rows) for count in Counter(workload.rows_of()).values())
        shrink, expand = (tiles, *shrink[1:]), (expand[0], tiles)
    options = {"launch_pdl": True} if machine.pdl else {}
    pairs = 50

    def work() -> None:
        for _ in range(pairs):
            nothing[shrink](machine.pdl, False, **options)
            nothing[expand](machine.pdl, True, **options)

    return replayed(work, pairs)


def replayed(work: Callable[[], None], count: int) -> float:
    work()  # compiled
    return graph_us(work) / count


def measured(workload: Workload, machine: Machine, rate: float) -> dict[str, Any]:
    us, (block, warps) = bytes_us(workload, pdl=machine.pdl)
    gc.collect()
    world = World(workload, CUDA)
    ours = measure(world, rate, world.once(kernels="reference"))
    return {
        "workload": workload.name, "floor_us": ours.floor_us, "empty_us": empty_us(workload, machine), "bytes_us": us,
        "block": block, "warps": warps, "us": ours.us, "config": ours.config,
    }  # fmt: skip


def row(found: Mapping[str, Any]) -> str:
    floor, least, ours = found["floor_us"], found["bytes_us"], found["us"]
    return (
        f"| {found['workload']} | {floor:.1f} | {found['empty_us']:.2f} | {least:.1f} ({least / floor:.2f}) | "
        f"{ours:.1f} ({ours / floor:.2f}) | {ours / least:.2f} |"
    )


def results(machine: Machine, chosen: Sequence[Workload]) -> Iterator[dict[str, Any]]:
    rate = copy_rate(torch.device(CUDA))
    print(f"{machine.name}, copy {rate / 1e12:.2f} TB/s\n\n{HEAD}", flush=True)
    for workload in chosen:
        found = measured(workload, machine, rate)
        print(row(found), flush=True)
        yield found
        gc.collect()


def table(facts: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        [
            "# What two dependent kernels can do at best",
            "",
            f"{facts['card']}, torch {facts['torch']}, Triton {facts['triton']}, commit {facts['commit']}.",
            "µs in a replayed CUDA graph; (×) is over the floor. `empty`: a pair that does nothing, with the engine's",
            "grids; `bytes`: a pair that only reads and writes what the workload must.",
            "",
            HEAD,
            *map(row, found),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only workloads with this in their name")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    arguments = parser.parse_args()
    machine = machine_at(CUDA)
    torch.manual_seed(0)
    found = list(results(machine, [one for one in WORKLOADS if arguments.match in one.name]))
    facts = {"commit": arguments.commit, **machine.as_json()}
    if not arguments.dry_run:
        store("kernel_bounds", {**facts, "results": found}, table(facts, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
