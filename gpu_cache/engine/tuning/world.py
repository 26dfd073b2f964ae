"""The world of one workload: layers with buffers of their own, random adapters that are all there, and a step.

There are as many layers as together read several times the L2, so that no replay finds its data there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from adapterd.gpu_cache.device import Device, open_device
from adapterd.gpu_cache.engine.engine import LoRAEngine
from adapterd.gpu_cache.engine.tuning.workloads import Widths, Workload
from adapterd.gpu_cache.slots import Resident
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.identity import FileEntry, VersionKey, sha256_hex
from adapterd.loader.layout import Dtype
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry
from adapterd.loader.planning import plan_layout
from adapterd.loader.sharding import WHOLE, Sharding

PAGE = 1 << 20
ENOUGH = 256 << 20
"""Bytes of all layers together: several times the L2."""
SCALING = 0.5
WEIGHTS = (1.0, 0.75, -0.5, 0.25)
"""Of a composition's adapters, in turn."""


class Layer(nn.Module):
    """A base linear whose output is a buffer; deltas pile up in it."""

    def __init__(self, widths: Widths, rows: int, device: str) -> None:
        super().__init__()
        self.in_features, self.out_features = widths.in_features, widths.out_features
        self.x = torch.randn(rows, self.in_features, device=device).bfloat16()
        self.y = torch.zeros(rows, self.out_features, device=device, dtype=torch.bfloat16)

    def forward(self, _x: Tensor) -> Tensor:
        return self.y


class Model(nn.ModuleList):
    """Layers with one linear `p` each."""

    def forward(self) -> None:
        for layer in self.layers():
            layer(layer.x)

    def layers(self) -> list[Layer]:
        return [layer for layer in self.modules() if isinstance(layer, Layer)]


class Ticket:
    def end(self) -> None:
        """Everything stays where it is: there is nothing to let go."""


@dataclass(frozen=True)
class Lease:
    composition: tuple[tuple[Resident, float], ...]


@dataclass(frozen=True)
class Sizes:
    max_residents: int
    page_bytes: int
    dtype: Dtype
    sharding: Sharding = WHOLE


class Residents:
    """A serving cache without a stager: random adapters, in pages in random order, that are there from the start."""

    def __init__(
        self, base: BaseSpec, ranks: Sequence[int], device: str, dtype: Dtype = "BF16", page_bytes: int = PAGE
    ) -> None:
        """Args: ranks: of each adapter, in all modules of the base."""
        self.base = base
        self.config = Sizes(len(ranks), page_bytes, dtype)
        self.device: Device = open_device(device)
        manifests = [_manifest(base, rank, index, dtype) for index, rank in enumerate(ranks)]
        layouts = [plan_layout(manifest, dtype, page_bytes) for manifest in manifests]
        count = sum(layout.n_pages for layout in layouts)
        words = torch.empty(count * page_bytes // 2, dtype=torch.bfloat16, device=device).normal_(std=1 / 64)
        self.arena = words.view(torch.uint8)
        free = random.Random(1).sample(range(count), count)  # noqa: S311 - a workload, no secret
        self.leases: list[Lease] = []
        for slot, (manifest, layout) in enumerate(zip(manifests, layouts, strict=True)):
            pages = tuple(free.pop() for _ in range(layout.n_pages))
            key = VersionKey("bench", base.pin, manifest.version_digest)
            self.leases.append(Lease(((Resident(key, slot, 0, manifest, layout, pages), 1.0),)))

    def begin_step(self, _leases: Sequence[Lease | None], /) -> Ticket:
        return Ticket()

    def rebind(self, base: BaseSpec, /) -> None:
        """All are of the old base: none is left."""
        self.base = base
        self.leases.clear()


def _manifest(base: BaseSpec, rank: int, index: int, dtype: Dtype) -> Manifest:
    modules = []
    for module in base.modules:
        k, n = module.in_features, module.out_features
        a = TensorEntry(f"{module.path}.a", dtype, (rank, k), 0, 1)
        b = TensorEntry(f"{module.path}.b", dtype, (n, rank), 0, 1)
        modules.append(ModuleEntry(module.path, rank, 1.0, SCALING, dtype, k, n, a, b))
    digest = sha256_hex(str(index).encode())
    return Manifest(base.pin, tuple(modules), (FileEntry("adapter_model.safetensors", digest, 1),))


class World:
    """Layers, adapters and a step of one workload.

    Args:
        sets: layers; by default as many as are enough.
    """

    def __init__(self, workload: Workload, device: str, sets: int | None = None) -> None:
        self.workload = workload
        self.sets = max(2, min(48, -(-ENOUGH // workload.nbytes()))) if sets is None else sets
        widths, owners = workload.linear, workload.rows_of()
        names = [f"p{i}" for i in range(len(widths.parts))]
        table = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: nn.Linear(widths.in_features, n, device="meta")
                    for name, n in zip(names, widths.parts, strict=True)
                }
            )
            for _ in range(self.sets)
        )
        base = BaseSpec.from_module(table, id="bench/linear", revision="f" * 40)
        ranks = [workload.rank_of(owner) for owner in range(max(owners) + 1) for _ in range(workload.adapters)]
        self.cache = Residents(base, ranks, device)
        self.model = Model(nn.ModuleDict({"p": Layer(widths, workload.rows, device)}) for _ in range(self.sets))
        self.stacked = {"p": names}
        leases = _composed(self.cache.leases, workload.adapters)
        self.rows = _runs([leases[owner] for owner in owners])

    def engine(self, **options: Any) -> LoRAEngine[Lease]:
        return LoRAEngine(self.model, self.cache, self.stacked, **options)

    def once(self, **options: Any) -> Tensor:
        """The first layer's output from zero, fp32."""
        self.zero()
        with self.engine(**options) as engine, engine.step(self.rows):
            self.model()
        return self.model.layers()[0].y.float()

    def zero(self) -> None:
        for layer in self.model.layers():
            layer.y.zero_()


def _composed(leases: Sequence[Lease], size: int) -> list[Lease]:
    """Every `size` of them as one composition, with `WEIGHTS`."""
    residents = [lease.composition[0][0] for lease in leases]
    every = [residents[begin : begin + size] for begin in range(0, len(residents), size)]
    return [Lease(tuple(zip(some, cycle(WEIGHTS), strict=False))) for some in every]


def _runs(leases: Sequence[Lease]) -> list[tuple[Lease, int]]:
    """(lease, rows) for the rows in order."""
    found: list[tuple[Lease, int]] = []
    for lease in leases:
        if found and found[-1][0] is lease:
            found[-1] = lease, found[-1][1] + 1
        else:
            found.append((lease, 1))
    return found
