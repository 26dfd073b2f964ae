"""What one rank measures of tensor-parallel serving: called on CPU with gloo, and on GPUs with NCCL.

A run serves one batch three ways: the whole model on this rank alone (TP=1), this rank's shard, and the shard's base
alone. All are seeded, so that every rank makes the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.sharding import sharding_of
from adapterd.loader.base_model import BaseSpec, ModuleKind
from adapterd.loader.layout import Dtype
from adapterd.loader.sharding import Sharding
from fakes.parallel_models import HIDDEN, SPLITS, STACKED, Split, network, network_spec, shard, sharding
from fakes.static_cache import Adapter, StaticCache, StaticLease

RANKS = (1, 3, 8, 16)
OWNERS = (0, -1, 1, 1, 2, -1, 3, 4, 4, 0)
"""Row → adapter, -1 the base, 4 a composition of two."""
DTYPES: Mapping[torch.dtype, Dtype] = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass
class Served:
    """One model with adapters of all linears it serves."""

    model: nn.Module
    base: BaseSpec
    sharding: Sharding
    device: str
    dtype: torch.dtype
    options: dict[str, Any]
    rows: int = 1

    def __post_init__(self) -> None:
        kept = DTYPES[self.dtype]
        self.cache = StaticCache(
            self.base, n_pages=1200, device=self.device, dtype=kept, sharding=self.sharding
        )  # fmt: skip
        paths = [m.path for m in self.base.modules if m.kind is not ModuleKind.EMBEDDING]
        self.engine = LoRAEngine(self.model, self.cache, targets=paths, **self.options)
        assert self.engine.served == set(paths)
        self.adapters = [
            self.cache.add(dict.fromkeys(paths[:: 1 + (seed == 2)], rank), seed=seed, dtype=kept)
            for seed, rank in enumerate(RANKS)
        ]

    def entries(self) -> list[tuple[StaticLease | None, int]]:
        return [(None if owner < 0 else self._lease(owner), self.rows) for owner in OWNERS]

    def _lease(self, owner: int) -> StaticLease:
        mix: list[tuple[Adapter, float]] = [(self.adapters[1], 0.75), (self.adapters[3], -0.5)]
        return self.cache.lease(*(mix if owner == len(RANKS) else [(self.adapters[owner], 1.0)]))


def compare(
    one: Served, many: Served, run: Callable[[nn.Module], Tensor], part: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Outputs of both, the base's, and what was sent; `part` takes this rank's part of a whole output."""
    with torch.no_grad():
        with CommDebugMode() as silent:
            base = run(many.model)
        with CommDebugMode() as spoken, many.engine.step(many.entries()) as step:
            got = run(many.model)
        with many.engine.step(many.entries()):
            again = run(many.model)
        with one.engine.step(one.entries()):
            wanted = run(one.model)
        plain = run(one.model)
    many.engine.close()
    with torch.no_grad():
        restored = run(many.model)
    return {
        "got": _plain(got), "again": _plain(again), "wanted": part(wanted).cpu(), "plain": part(plain).cpu(),
        "base": _plain(base), "restored": _plain(restored), "sent": spoken.get_total_counts(),
        "sent_by_base": silent.get_total_counts(), "kernel": step.receipt.kernel, "reasons": step.receipt.reasons,
        "not_run": step.receipt.not_run,
    }  # fmt: skip


def local_network(
    rank: int, size: int, device: str, dtype: torch.dtype = torch.float32, *, fused: bool = False, inside: bool = False
) -> dict[str, Any]:
    """Local weights; the reduction is the layer's, or inside of its row-parallel linears."""
    split = Split(rank, size, dist.all_reduce, "inside" if inside else "outside", fused)
    whole, base = network(dtype, device), network_spec()
    options: dict[str, Any] = {"stacked": STACKED} if fused else {}
    if inside:
        options["reduced"] = {"o_proj": dist.all_reduce, "down_proj": dist.all_reduce}
    many = Served(shard(whole, split), base, sharding(rank, size), device, dtype, options)
    one = Served(whole, base, Sharding(), device, dtype, {})
    x = _inputs(device, dtype)
    return compare(one, many, lambda model: model(x), lambda y: y.chunk(size, dim=-1)[rank])


def torch_plan(rank: int, size: int, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """`parallelize_module`: DTensor weights, the reduction in a forward hook. Two key heads: for two ranks at most."""
    base, split = network_spec(), network(dtype, device)
    plan = {
        f"{'' if name == 'lm_head' else 'layers.*.'}{name}": ColwiseParallel()
        if axis == "column"
        else RowwiseParallel()
        for name, axis in SPLITS.items()
    }
    parallelize_module(split, init_device_mesh(device.partition(":")[0], (size,)), plan)
    found = sharding_of(split)
    many, one = (
        Served(m, base, s, device, dtype, {}) for m, s in ((split, found), (network(dtype, device), Sharding()))
    )
    x = _inputs(device, dtype)
    return compare(one, many, lambda model: model(x), lambda y: y.chunk(size, dim=-1)[rank])


def transformers_plan(
    rank: int, size: int, device: str, dtype: torch.dtype = torch.float32, *, folder: str
) -> dict[str, Any]:
    """The model's own plan, as `from_pretrained` applies it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    def load(**words: Any) -> nn.Module:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **words)
        return model.eval().requires_grad_(False)

    split, whole = load(distributed_config=DistributedConfig(tp_plan="auto")), load().to(device)
    base = BaseSpec.from_module(whole, id="tests/llama", revision="e" * 40)
    assert BaseSpec.from_module(split, id="tests/llama", revision="e" * 40) == base
    many, one = (
        Served(m, base, s, device, dtype, {}, rows=5) for m, s in ((split, sharding_of(split)), (whole, Sharding()))
    )
    ids = torch.randint(0, 96, (len(OWNERS), 5), generator=torch.Generator().manual_seed(5)).to(device)
    return compare(one, many, lambda model: model(input_ids=ids).logits, lambda y: y)


def _inputs(device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(len(OWNERS), HIDDEN, generator=torch.Generator().manual_seed(4)).to(device, dtype)


def _plain(y: Tensor) -> Tensor:
    return (y.to_local() if isinstance(y, DTensor) else y).cpu()
