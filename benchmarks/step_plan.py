"""E5: what a step's plan costs the CPU, by batch and by what has changed since the step before. No GPU.

    python -m benchmarks.step_plan              # results/step_plan.json and step_plan.md; half a minute
    python -m benchmarks.step_plan --dry-run

An engine with its kernels (never run: the interpreter is there so that it opens) over an arena in host memory, with
the seven linears of 32 layers, narrow ones: a plan does not depend on widths. Four kinds of steps:

    standing      the batch of the step before
    changed       one lease is another one, of an adapter that has served before
    all changed   all of them are others, the adapters in another order
    new adapter   one lease's adapter has come into its slot just now: its table row is made, too

Each is the engine's whole way into a step and out of it without the cache's part: entries checked, plan made, lists
filled and copied, from host memory to host memory. `plan` is a changed batch's plan and lists alone, what the goal is
for; `plan anew` is that of a batch in another order. `numpy fill` is the limit: numpy alone writing the same lists from
numbers that are known. Times are medians by the clock, and a ratio is of one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
from benchmarks.machine import circumstances, store
from torch import nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.device_tables import DeviceTables
from adapterd.gpu_cache.engine.lists import Work, fill, shape_of
from adapterd.gpu_cache.engine.plan import Planner, split_rows
from adapterd.gpu_cache.engine.shares import Shares
from adapterd.gpu_cache.engine.tuning.world import Lease, Residents
from adapterd.gpu_cache.table_shape import Matrix, TableShape
from adapterd.loader.base_model import BaseSpec

PAGE = 1 << 14
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
LAYERS, WIDTH = 32, 16
RANKS = (8, 16, 32, 64)
ADAPTERS = 257
"""The last one comes in when a batch changes."""
GOALS_US = {
    "T64 distinct": 30.0,
    "T64 Zipf": 30.0,
    "T64 Zipf, wide linears": 30.0,
    "T64 compositions of 2": 30.0,
    "T8192 of 8": 100.0,
}


@dataclass(frozen=True)
class Batch:
    """Adapters of each entry, and rows of each entry. `tiles`: the model has linears so wide that they want tiles."""

    name: str
    entries: Sequence[tuple[int, ...]]
    rows: int = 1
    tiles: bool = False


def batches() -> list[Batch]:
    order = np.random.default_rng(1)
    zipf = [(int(slot) % (ADAPTERS - 1),) for slot in order.zipf(1.3, 64)]
    return [
        Batch("T64 distinct", [(int(slot),) for slot in order.permutation(64)]),
        Batch("T64 Zipf", zipf),
        Batch("T64 Zipf, wide linears", zipf, tiles=True),
        Batch("T64 compositions of 2", [(slot, slot + 64) for slot in range(64)]),
        Batch("T256 distinct", [(int(slot),) for slot in order.permutation(256)]),
        Batch("T256 of 16", [(int(slot) % 16,) for slot in order.permutation(256)]),
        Batch("T8192 of 8", [(slot,) for slot in range(8)], 1024),
    ]


def lease_on(cache: Residents, slots: Sequence[int], *, generation: int = 0) -> Lease:
    """A composition of these adapters, weights 1; with a `generation`, as if they had just come into their slots."""
    residents = [cache.leases[slot].composition[0][0] for slot in slots]
    return Lease(tuple([(replace(r, generation=generation) if generation else r, 1.0) for r in residents]))


class Bench:
    """An engine, and the steps of one kind after the other."""

    def __init__(self, repeats: int) -> None:
        layers = (nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in LINEARS}) for _ in range(LAYERS))
        model, self.repeats = nn.ModuleList(layers), repeats
        base = BaseSpec.from_module(model, id="bench/plan", revision="f" * 40)
        self.cache = Residents(base, [RANKS[slot % len(RANKS)] for slot in range(ADAPTERS)], "cpu", "F32", PAGE)
        self.engine = LoRAEngine(model, self.cache, kernels="triton")

    def measure(self, batch: Batch) -> dict[str, float]:
        """Median microseconds by kind of step; `numpy fill` is the limit."""
        leases = [lease_on(self.cache, slots) for slots in batch.entries]
        other = lease_on(self.cache, [ADAPTERS - 1])
        self._step([(lease_on(self.cache, [slot]), 1) for slot in range(ADAPTERS)])  # all tables' rows
        before = [(lease, batch.rows) for lease in leases]
        changed = [*before[:-1], (other, batch.rows)]
        fill = Limit(self.cache, batch)
        found = {"numpy fill": self._median(lambda _: fill, lambda limit: limit())}
        found["plan"] = self._plans(batch.tiles, before, changed)
        found["plan anew"] = self._plans(batch.tiles, before, before[::-1])
        if batch.tiles:  # the engine's are narrow
            return found
        found["standing"] = self._steps(lambda _: before)
        found["changed"] = self._steps(lambda n: (before, changed)[n % 2])
        orders = batch.entries, batch.entries[::-1]
        found["all changed"] = self._steps(lambda n: [(lease_on(self.cache, s), batch.rows) for s in orders[n % 2]])
        found["new adapter"] = self._steps(
            lambda n: [*before[:-1], (lease_on(self.cache, [ADAPTERS - 1], generation=n + 1), batch.rows)]
        )
        return found

    def _plans(self, tiles: bool, *batches: list[tuple[Lease, int]]) -> float:
        modules = [Matrix(m.path, m.in_features, m.out_features) for m in self.cache.base.modules]
        shape = TableShape(modules, ADAPTERS, 128, "F32", PAGE)
        shares, planner = Shares(DeviceTables(shape, self.cache.arena.device), lambda _: None), Planner()
        split = [split_rows(batch) for batch in batches]
        buffer = np.zeros(1 << 20, np.int32)

        def work(entries: tuple[tuple[Lease, ...], tuple[int, ...]]) -> None:
            plan = planner.plan(*entries)
            of = shares.of_plan(plan)
            mixed = shares.mixed(of)
            step = Work(of, plan.lengths, plan.rows, shares.entries, mixed)
            fill(shape_of(step, lambda *_: tiles, batch_invariant=False), step, buffer)

        return self._median(lambda n: split[n % len(split)], work)

    def _steps(self, batch_of: Callable[[int], list[tuple[Lease, int]]]) -> float:
        return self._median(batch_of, self._step)

    def _step(self, rows: list[tuple[Lease, int]]) -> None:
        with self.engine.step(rows):
            pass

    def _median(self, given: Callable[[int], Any], work: Callable[[Any], object]) -> float:
        times = []
        for n in range(self.repeats + self.repeats // 10):
            what = given(n)
            began = time.perf_counter_ns()
            work(what)
            times.append(time.perf_counter_ns() - began)
        return statistics.median(times[self.repeats // 10 :]) / 1e3


class Limit:
    """numpy alone: entries of known slots taken from a table that stands ready, an item a block."""

    def __init__(self, cache: Residents, batch: Batch) -> None:
        self.slots = [slot for slots in batch.entries for slot in slots]
        self.entries, self.rows = len(batch.entries), batch.rows
        self.table = np.zeros((ADAPTERS, 8), np.int32)
        rows = -(-max(RANKS) // 4)
        self.table[:, 3] = [-(-RANKS[slot % len(RANKS)] // rows) for slot in range(ADAPTERS)]
        self.out = np.zeros((1 << 16, 8), np.int32)

    def __call__(self) -> None:
        tiles = self.table.take(np.array(self.slots, np.intp), axis=0)
        if self.rows > 1:  # rows in tiles of 64
            tiles = tiles.repeat(self.rows // 64, axis=0)
            self.out[-1024:].reshape(-1)[: self.entries * self.rows] = np.arange(self.entries * self.rows)
        tiles[:, 0] = np.arange(len(tiles))
        self.out[: len(tiles)] = tiles
        if self.rows == 1:
            items = tiles.repeat(tiles[:, 3], axis=0)
            self.out[len(tiles) : len(tiles) + len(items)] = items


def rows_of(result: dict[str, dict[str, float]]) -> Iterator[str]:
    kinds = list(next(iter(result.values())))
    yield f"| batch | {' | '.join(kinds)} | plan over fill | goal |"
    yield "|---" * (len(kinds) + 3) + "|"
    for name, found in result.items():
        ratio = found["plan"] / found["numpy fill"]
        goal = f"{GOALS_US[name]:g}" if name in GOALS_US else ""
        cells = [f"{found[kind]:.1f}" if kind in found else "" for kind in kinds]
        yield f"| {' | '.join([name, *cells, f'{ratio:.1f}', goal])} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    asked = parser.parse_args()
    bench = Bench(asked.repeats)
    result = {batch.name: bench.measure(batch) for batch in batches()}
    about = circumstances(("numpy", "torch", "adapterd"))
    where = f"{about['processor']}, commit {about['commit'][:10]}"
    title = f"# A step on the CPU\n\nµs, median of {asked.repeats}; {where}.\n\n"
    table = title + "\n".join(rows_of(result)) + "\n"
    if not asked.dry_run:
        store("step_plan", {"what": "a step's plan on the CPU, µs", **about, "goals": GOALS_US, "rows": result}, table)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
