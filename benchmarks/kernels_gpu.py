"""The engine's kernels on one card: time over the floor, by linear and workload, in a replayed CUDA graph.

    python -m benchmarks.kernels_gpu --warm 12 --commit "$(git rev-parse HEAD)" --out FILE

One step of an engine runs `sets` layers of the same shape, each with weights, x and y of its own, together more than
the L2; a graph of them is captured in the step and replayed. Time is the median of replays over the layers. The
floor is the fewest bytes (x of adapted rows, A and B of each adapter once, y read and written) over the rate of a
device-to-device copy in the same run. The torch reference is timed beside it, launched from Python. Before a workload
is timed, its output is compared with the reference's.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adapterd.gpu_cache.device import open_device
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.slots import Resident
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.identity import FileEntry, VersionKey, sha256_hex
from adapterd.loader.layout import plan_layout
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry

CUDA = "cuda:0"
PAGE = 1 << 20
ENOUGH = 256 << 20
"""Bytes of all sets together: several times the L2."""
LINEARS: dict[str, tuple[int, tuple[int, ...]]] = {
    "q": (4096, (4096,)),
    "qkv": (4096, (4096, 1024, 1024)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
MIXED = (8, 16, 32, 64)


@dataclass(frozen=True)
class Workload:
    """`owners`: `distinct`, `zipf` over 256, or `8` adapters with a request each; `rank` 0 is `MIXED`."""

    linear: str
    rows: int
    owners: str
    rank: int

    @property
    def name(self) -> str:
        return f"{self.linear} T{self.rows} {self.owners} r{self.rank or 'mixed'}"

    def rows_of(self) -> list[int]:
        """The adapter of each row."""
        if self.owners == "distinct":
            return random.Random(self.name).sample(range(self.rows), self.rows)
        if self.owners == "zipf":
            weights = [1.0 / (i + 1) ** 1.1 for i in range(256)]
            drawn = random.Random(self.name).choices(range(256), weights, k=self.rows)
            known = {adapter: index for index, adapter in enumerate(sorted(set(drawn)))}
            return [known[adapter] for adapter in drawn]
        count = int(self.owners)
        return [index * count // self.rows for index in range(self.rows)]

    def rank_of(self, adapter: int) -> int:
        return self.rank or MIXED[adapter % len(MIXED)]

    def nbytes(self) -> int:
        """The fewest of one layer."""
        width, parts = LINEARS[self.linear]
        ranks = sum(self.rank_of(adapter) for adapter in set(self.rows_of()))
        return 2 * (self.rows * width + ranks * (width * len(parts) + sum(parts)) + 2 * self.rows * sum(parts))


def workloads() -> list[Workload]:
    kinds = [(64, "distinct", 16), (64, "zipf", 16), (64, "distinct", 0), (256, "distinct", 16), (256, "zipf", 64)]
    kinds += [(2048, "8", 16), (2048, "8", 64)]
    return [Workload(linear, *kind) for linear in LINEARS for kind in kinds]


class Layer(nn.Module):
    """A base linear whose output is a buffer; deltas pile up in it."""

    def __init__(self, in_features: int, out_features: int, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.x = torch.randn(rows, in_features, device=CUDA).bfloat16()
        self.y = torch.zeros(rows, out_features, device=CUDA, dtype=torch.bfloat16)

    def forward(self, _x: Tensor) -> Tensor:
        return self.y


class Model(nn.ModuleList):
    def forward(self) -> None:
        for layer in self:
            layer["p"](layer["p"].x)


class Ticket:
    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Lease:
    composition: list[tuple[Resident, float]]


@dataclass(frozen=True)
class Sizes:
    max_residents: int = 256
    page_bytes: int = PAGE
    dtype: str = "BF16"


class Residents:
    """Random adapters that are all there, in pages in random order; a serving cache."""

    def __init__(self, base: BaseSpec, ranks: Sequence[int]) -> None:
        self.base, self.config, self.device = base, Sizes(), open_device(CUDA)
        manifests = [self._manifest(rank, index) for index, rank in enumerate(ranks)]
        layouts = [plan_layout(manifest, "BF16", PAGE) for manifest in manifests]
        count = sum(layout.n_pages for layout in layouts)
        words = torch.empty(count * PAGE // 2, dtype=torch.bfloat16, device=CUDA).normal_(std=1 / 64)
        self.arena = words.view(torch.uint8)
        free = random.Random(1).sample(range(count), count)
        self.leases = []
        for slot, (manifest, layout) in enumerate(zip(manifests, layouts, strict=True)):
            pages = tuple(free.pop() for _ in range(layout.n_pages))
            key = VersionKey("t", base.pin, manifest.version_digest)
            self.leases.append(Lease([(Resident(key, slot, 0, manifest, layout, pages), 1.0)]))

    def _manifest(self, rank: int, index: int) -> Manifest:
        modules = []
        for module in self.base.modules:
            a = TensorEntry(f"{module.path}.a", "BF16", (rank, module.in_features), 0, 1)
            b = TensorEntry(f"{module.path}.b", "BF16", (module.out_features, rank), 0, 1)
            modules.append(
                ModuleEntry(module.path, rank, 1.0, 0.5, "BF16", module.in_features, module.out_features, a, b)
            )
        digest = sha256_hex(str(index).encode())
        return Manifest(self.base.pin, tuple(modules), (FileEntry("adapter_model.safetensors", digest, 1),))

    def begin_step(self, _leases: Sequence[Any], /) -> Ticket:
        return Ticket()

    def rebind(self, base: BaseSpec, /) -> None:
        raise NotImplementedError


class World:
    """Layers, adapters and a step of one workload."""

    def __init__(self, workload: Workload, sets: int) -> None:
        width, parts = LINEARS[workload.linear]
        table = nn.ModuleList(
            nn.ModuleDict({f"p{i}": nn.Linear(width, n, device="meta") for i, n in enumerate(parts)})
            for _ in range(sets)
        )
        base = BaseSpec.from_module(table, id="bench/linear", revision="f" * 40)
        owners = workload.rows_of()
        self.cache = Residents(base, [workload.rank_of(adapter) for adapter in range(max(owners) + 1)])
        self.model = Model(nn.ModuleDict({"p": Layer(width, sum(parts), workload.rows)}) for _ in range(sets))
        self.stacked = {"p": [f"p{i}" for i in range(len(parts))]}
        self.rows: list[tuple[Any, int]] = []
        for owner in owners:
            lease = self.cache.leases[owner]
            if self.rows and self.rows[-1][0] is lease:
                self.rows[-1] = lease, self.rows[-1][1] + 1
            else:
                self.rows.append((lease, 1))

    def engine(self, **options: Any) -> LoRAEngine[Any]:
        return LoRAEngine(self.model, self.cache, self.stacked, **options)

    def once(self, **options: Any) -> Tensor:
        """The first layer's output from zero."""
        for layer in self.model:
            layer["p"].y.zero_()
        with self.engine(**options) as engine, engine.step(self.rows):
            self.model()
        return self.model[0]["p"].y.float()


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def events(work: Callable[[], object], repeats: int) -> float:
    """µs, median."""
    pairs = []
    for _ in range(repeats):
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        work()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return 1e3 * median([a.elapsed_time(b) for a, b in pairs])


def copy_rate() -> float:
    """Bytes read and written a second."""
    source = torch.empty(1 << 29, dtype=torch.int32, device=CUDA).random_()
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / events(lambda: target.copy_(source), 7) * 1e6


def in_a_graph(world: World, sets: int, pdl: bool) -> dict[str, float]:
    with world.engine(kernels="triton", strict=True, pdl=pdl) as engine:
        with engine.step(world.rows):
            world.model()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                world.model()
        with engine.step(world.rows):
            graph.replay()
            graph.replay()
            torch.cuda.synchronize()
            replay = events(graph.replay, 21) / sets
            began = time.perf_counter()
            world.model()
            eager = 1e6 * (time.perf_counter() - began) / sets
        steps = []
        for _ in range(30):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step = engine.step(world.rows).__enter__()
            steps.append(1e6 * (time.perf_counter() - began))
            step.__exit__(None, None, None)
    return {"us": replay, "launch_cpu_us": eager, "step_cpu_us": median(steps)}


def measured(workload: Workload, rate: float) -> dict[str, Any]:
    sets = max(2, min(48, -(-ENOUGH // workload.nbytes())))
    world = World(workload, sets)
    floor = 1e6 * workload.nbytes() / rate
    wanted = world.once(kernels="reference")
    found: dict[str, Any] = {"workload": workload.name, **asdict(workload), "sets": sets, "floor_us": floor}
    for name, pdl in (("plain", False), ("pdl", True)):
        got = world.once(kernels="triton", pdl=pdl)
        found[f"{name}_error"] = float((got - wanted).norm() / wanted.norm())
        if found[f"{name}_error"] < 1e-2:
            found[name] = in_a_graph(world, sets, pdl)
    with world.engine(kernels="reference") as engine, engine.step(world.rows):
        found["reference_us"] = events(world.model, 2) / sets
    return found


def row(found: dict[str, Any]) -> str:
    floor = found["floor_us"]
    cells = [found["workload"], f"{floor:.1f}"]
    for name in ("plain", "pdl"):
        cells.append(f"{found[name]['us']:.1f} ({found[name]['us'] / floor:.2f})" if name in found else "wrong")
    cells.append(f"{found['reference_us']:.0f}")
    cells += (
        [f"{found['pdl']['step_cpu_us']:.0f}", f"{found['pdl']['launch_cpu_us']:.0f}"] if "pdl" in found else ["", ""]
    )
    return "| " + " | ".join(cells) + " |"


HEAD = """| workload | floor µs | kernels (×) | with PDL (×) | reference, eager | step CPU µs | launch CPU µs |
|---|---|---|---|---|---|---|"""


def compile_all(processes: int, match: str) -> None:
    """Kernels into Triton's cache, in several processes."""
    words = [sys.executable, "-m", "benchmarks.kernels_gpu", "--match", match, "--shard"]
    running = [
        subprocess.Popen([*words, f"{index}/{processes}"], stdout=subprocess.DEVNULL) for index in range(processes)
    ]
    for process in running:
        process.wait()


def shard(chosen: Sequence[Workload]) -> None:
    for workload in chosen:
        world = World(workload, 1)
        for pdl in (False, True):
            world.once(kernels="triton", pdl=pdl)


def kept(chosen: Sequence[Workload], words: str) -> Iterator[Workload]:
    index, count = map(int, words.split("/"))
    yield from chosen[index::count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only workloads with this in their name")
    parser.add_argument("--warm", type=int, default=0, help="compile in so many processes first")
    parser.add_argument("--shard", default="", help="for --warm")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    chosen = [workload for workload in workloads() if arguments.match in workload.name]
    if arguments.shard:
        shard(list(kept(chosen, arguments.shard)))
        return 0
    began = time.perf_counter()
    if arguments.warm:
        compile_all(arguments.warm, arguments.match)
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    torch.manual_seed(0)
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s\n\n{HEAD}", flush=True)
    results = []
    for workload in chosen:
        results.append(measured(workload, rate))
        print(row(results[-1]), flush=True)
        gc.collect()
    if arguments.out:
        import triton

        machine = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        body = {"commit": arguments.commit, "machine": machine, "copy_bytes_per_second": rate, "results": results}
        arguments.out.write_text(json.dumps(body, indent=1) + "\n")
    print(f"\n{time.perf_counter() - began:.0f} s")
    return 0 if all("plain" in found and "pdl" in found for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
