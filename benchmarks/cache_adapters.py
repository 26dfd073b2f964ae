"""Adapters made up in memory, thousands of them, and the loader that serves them without disk or signature.

For figures that are about what comes after verification. All versions share one bank of random values, each
from another offset on: real bytes, finite, different, and no more memory than one adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from benchmarks.adapters import BITS

from adapterd.gpu_cache.host.interface import Origin
from adapterd.gpu_cache.host.loading import Cancelled, Fill, Prepared, Serving, Told
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.errors import Code, error
from adapterd.loader.identity import WEIGHTS_FILE, FileEntry, Ref
from adapterd.loader.image import Memory
from adapterd.loader.layout import Layout
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry
from adapterd.loader.planning import plan_layout
from adapterd.loader.sources import Resolved

TENANT = "acme"
REVISION = "8" * 40
# Llama-3.1-8B: hidden size 4096, 8 key-value heads of 128, feed-forward 14336.
LLAMA_8B = {
    "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (4096, 1024), "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (4096, 14336), "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LLAMA_TINY = {name: (max(n // 64, 32), max(m // 64, 32)) for name, (n, m) in LLAMA_8B.items()}
LLAMA_LAYERS = 32
SHIFT_BYTES = 1 << 20


def llama_base(layers: int = LLAMA_LAYERS, *, small: bool = False) -> BaseSpec:
    """All seven linears of every layer."""
    linears = LLAMA_TINY if small else LLAMA_8B
    modules = [
        BaseModule(f"model.layers.{i}.{name}", ModuleKind.LINEAR, n, m)
        for i in range(layers)
        for name, (n, m) in linears.items()
    ]
    return BaseSpec.of(modules, id="benchmarks/llama", revision=REVISION)


def own_bytes(manifest: Manifest) -> int:
    """Of the factors, as the file has them (two bytes an element)."""
    return sum(2 * m.rank * (m.in_features + m.out_features) for m in manifest.modules)


@dataclass(frozen=True)
class Shape:
    """Rank, and which of the base's linears it adapts.

    Attributes:
        linears: so many of them, the first; None: all.
        named: those with these last names; none: whatever they are called.
    """

    rank: int
    linears: int | None = None
    named: tuple[str, ...] = ()


@cache
def modules_of(base: BaseSpec, shape: Shape) -> tuple[ModuleEntry, ...]:
    """Those of the base's linears, without the output head, BF16, scaling 1."""
    entries, at, rank = [], 4096, shape.rank
    linears = [m for m in base.modules if m.kind is ModuleKind.LINEAR and m.path != "lm_head"]
    wanted = [m for m in linears if not shape.named or m.path.rpartition(".")[2] in shape.named]
    for module in sorted(wanted, key=lambda m: m.path)[: shape.linears]:
        n, m = module.in_features, module.out_features
        middle, end = at + 2 * rank * n, at + 2 * rank * (n + m)
        a = TensorEntry(f"{module.path}.lora_A.weight", "BF16", (rank, n), at, middle)
        b = TensorEntry(f"{module.path}.lora_B.weight", "BF16", (m, rank), middle, end)
        entries.append(ModuleEntry(module.path, rank, float(rank), 1.0, "BF16", n, m, a, b))
        at = end
    return tuple(entries)


@cache
def layout_of(base: BaseSpec, shape: Shape, page_bytes: int) -> Layout:
    return plan_layout(Manifest(base.pin, modules_of(base, shape), ()), "BF16", page_bytes)


class Bank:
    """Random finite BF16 values for images of up to `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        mask, exponent = BITS["BF16"]
        words = np.random.default_rng(1).integers(0, 1 << 16, (nbytes + SHIFT_BYTES) // 2, np.uint16)
        self._bytes = ((words & np.uint16(mask)) | np.uint16(exponent)).view(np.uint8)

    def write(self, number: int, out: Memory) -> None:
        at = (number * 7919 * 256) % SHIFT_BYTES
        for piece in [out] if isinstance(out, memoryview) else out:
            np.frombuffer(piece, np.uint8)[:] = self._bytes[at : at + piece.nbytes]
            at += piece.nbytes


@dataclass(frozen=True)
class MadeUp:
    """A version. Prepared."""

    loader: MadeUpLoader
    number: int
    shape: Shape

    @cached_property
    def manifest(self) -> Manifest:
        digest = hashlib.sha256(f"made up {self.number}".encode()).hexdigest()
        modules = modules_of(self.loader.base, self.shape)
        return Manifest(self.loader.base.pin, modules, (FileEntry(WEIGHTS_FILE, digest, modules[-1].b.end),))

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.loader.base, self.shape, self.loader.page_bytes)

    @property
    def publisher(self) -> str | None:
        return None

    @property
    def alias(self) -> str:
        return f"{TENANT}/a{self.number}"

    @cached_property
    def pinned(self) -> str:
        return f"{self.alias}@sha256:{self.manifest.version_digest}"

    def fill(self, out: Memory) -> Fill:
        self.loader.bank.write(self.number, out)
        return Fill(Origin.DISK)


class MadeUpLoader:
    """Loader over versions in memory, one for each of `shapes`."""

    trust_changes = 0

    def __init__(self, base: BaseSpec, shapes: Sequence[Shape], page_bytes: int) -> None:
        self.base, self.page_bytes = base, page_bytes
        self.versions = [MadeUp(self, number, shape) for number, shape in enumerate(shapes)]
        self._named = {v.alias: v for v in self.versions}
        self.bank = Bank(max(layout_of(base, shape, page_bytes).nbytes for shape in set(shapes)))

    @property
    def pages(self) -> int:
        """Of all versions together."""
        return sum(v.layout.n_pages for v in self.versions)

    def resolve(self, ref: Ref, tenant: str) -> Resolved:
        version = self._named.get(f"{ref.tenant}/{ref.name}")
        if version is None or ref.digest not in {None, version.manifest.version_digest}:
            raise error(Code.NOT_FOUND, str(ref), "no version was made up under that name")
        digest = version.manifest.version_digest
        return Resolved(replace(ref, digest=digest), tenant, ref.name, digest, 1, self.base.pin)

    def prepare(self, resolved: Resolved, serving: Serving, cancelled: Cancelled, told: Told) -> Prepared:
        return self._named[f"{resolved.tenant}/{resolved.adapter}"]
