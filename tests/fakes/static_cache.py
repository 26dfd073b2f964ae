"""A cache in which everything is resident: the engine's narrow interface, without loading or eviction.

Its arena is poisoned with NaN wherever no block of a live adapter lies, its pages are handed out in a
shuffled order, and a released slot is poisoned at once: a read outside an adapter's own blocks shows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adapterd.gpu_cache.device import Device, open_device
from adapterd.gpu_cache.slots import Resident
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import Code, error
from adapterd.loader.identity import FileEntry, VersionKey, sha256_hex
from adapterd.loader.layout import Dtype
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry
from adapterd.loader.planning import plan_layout
from adapterd.loader.sharding import WHOLE, Sharding

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
POISON = 0xFF
"""Every byte: a NaN in fp32, fp16 and bf16."""


@dataclass(frozen=True)
class Factors:
    """One adapted module: A [rank, in], B [out, rank], as the dtype stores them, and the scaling."""

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True)
class Adapter:
    """A version made up in memory: module path → factors."""

    modules: Mapping[str, Factors]
    resident: Resident


@dataclass
class StaticLease:
    """A hold on a composition; `ready` and `released` are set by the test."""

    composition: list[tuple[Resident, float]]
    ready: bool = True
    released: bool = False


@dataclass
class StaticTicket:
    """Counts how often it was ended."""

    ends: int = 0

    def end(self) -> None:
        self.ends += 1


@dataclass(frozen=True)
class StaticSizes:
    """What the kernels' tables are sized by."""

    page_bytes: int
    dtype: str
    max_residents: int
    sharding: Sharding = WHOLE


class StaticCache:
    """See the module. `tickets` lists one ticket for each step that began."""

    def __init__(
        self,
        base: BaseSpec,
        *,
        device: str = "cpu",
        n_pages: int = 512,
        page_bytes: int = 4096,
        dtype: str = "auto",
        slots: int = 64,
        sharding: Sharding = WHOLE,
    ) -> None:
        self.base, self.n_pages, self.page_bytes = base, n_pages, page_bytes
        self.device: Device = open_device(device)
        self.config = StaticSizes(page_bytes, dtype, slots, sharding)
        self.tickets: list[StaticTicket] = []
        nbytes = self.n_pages * self.page_bytes
        self.arena = torch.full((nbytes,), POISON, dtype=torch.uint8, device=device)
        self._free = list(range(self.n_pages))
        random.Random(5).shuffle(self._free)
        self._generations: dict[int, int] = {}
        self._free_slots = list(range(slots))

    def add(
        self,
        ranks: Mapping[str, int],
        *,
        seed: int,
        scaling: float = 0.5,
        dtype: Dtype = "F32",
        tenant: str = "acme",
    ) -> Adapter:
        """Make random factors for the modules of `ranks` (path → rank), and put them into the arena."""
        modules = {}
        for index, (path, rank) in enumerate(sorted(ranks.items())):
            entry = self.base.module(path)
            assert entry is not None, path
            generator = torch.Generator().manual_seed(1000 * seed + index)
            a = torch.randn(rank, entry.in_features, generator=generator) * entry.in_features**-0.5
            b = torch.randn(entry.out_features, rank, generator=generator) * rank**-0.5
            kept = TORCH_DTYPES[dtype]
            modules[path] = Factors(a.to(kept), b.to(kept), scaling * (1 + index % 3))
        manifest = _manifest(self.base, modules, dtype, seed)
        return Adapter(modules, self._store(manifest, modules, dtype, tenant))

    def _store(self, manifest: Manifest, modules: Mapping[str, Factors], dtype: Dtype, tenant: str) -> Resident:
        layout = plan_layout(manifest, dtype, self.page_bytes, self.config.sharding)
        pages = tuple(self._free.pop() for _ in range(layout.n_pages))
        slot = self._free_slots.pop(0)
        key = VersionKey(tenant, self.base.pin, manifest.version_digest)
        resident = Resident(key, slot, self._generations.setdefault(slot, 0), manifest, layout, pages)
        for block in layout.blocks:
            factors = modules[manifest.modules[block.module].name]
            module = manifest.modules[block.module]
            cut = self.config.sharding.cut(module.name, module.in_features, module.out_features)
            kept = cut.inputs if block.matrix == "a" else cut.outputs
            whole = factors.a if block.matrix == "a" else factors.b.T
            rows = torch.cat([whole[:, begin:end] for begin, end in kept], dim=1)
            data = rows[block.row : block.row + block.rows].contiguous().view(torch.uint8).flatten()
            begin = pages[block.page] * layout.page_bytes + block.offset
            self.arena[begin : begin + data.numel()] = data.to(self.arena.device)
        return resident

    def lease(self, *parts: tuple[Adapter, float] | Adapter) -> StaticLease:
        """A ready lease; an adapter alone has weight 1."""
        pairs = [p if isinstance(p, tuple) else (p, 1.0) for p in parts]
        return StaticLease([(adapter.resident, weight) for adapter, weight in pairs])

    def evict(self, adapter: Adapter) -> None:
        """Poison the pages, and let the next adapter have them and the slot."""
        resident = adapter.resident
        for page in resident.pages:
            self.arena[page * self.page_bytes : (page + 1) * self.page_bytes] = POISON
        self._free += resident.pages
        self._generations[resident.slot] += 1
        self._free_slots.insert(0, resident.slot)

    def begin_step(self, leases: Sequence[StaticLease | None], /) -> StaticTicket:
        for lease in filter(None, leases):
            if lease.released:
                raise error(Code.LEASE_RELEASED, "lease", "the lease has been released")
            if not lease.ready:
                raise error(Code.LEASE_NOT_READY, "lease", "the lease is not ready")
            for resident, _ in lease.composition:
                if self._generations[resident.slot] != resident.generation:
                    raise error(Code.SLOT_STALE, f"slot {resident.slot}", "the slot holds another adapter now")
        self.tickets.append(StaticTicket())
        return self.tickets[-1]

    def rebind(self, base: BaseSpec, /) -> None:
        self.base = base
        for slot in self._generations:
            self._generations[slot] += 1
        self.arena.fill_(POISON)


def _manifest(base: BaseSpec, modules: Mapping[str, Factors], dtype: Dtype, seed: int) -> Manifest:
    entries = []
    for path, factors in modules.items():
        rank, in_features = factors.a.shape
        out_features = factors.b.shape[0]
        a = TensorEntry(f"{path}.lora_A.weight", dtype, (rank, in_features), 0, 1)
        b = TensorEntry(f"{path}.lora_B.weight", dtype, (out_features, rank), 0, 1)
        entries.append(ModuleEntry(path, rank, 1.0, factors.scaling, dtype, in_features, out_features, a, b))
    digest = sha256_hex(f"{seed} {dtype}".encode())
    return Manifest(base.pin, tuple(entries), (FileEntry("adapter_model.safetensors", digest, 1),))
