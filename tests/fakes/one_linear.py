"""One linear at a time for the kernels' tests: plain layers over a static cache, and float64 beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from adapterd.gpu_cache.engine import LoRAEngine, Receipt
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.layout import Dtype
from fakes.static_cache import Adapter, StaticCache

Owners = Sequence[Sequence[tuple[int, float]]]  # row → its composition: (adapter, weight)


class Fused(nn.Module):
    """A base linear that gives back the y it is told to; its parts stand side by side along the output."""

    def __init__(self, in_features: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, sum(widths)
        self.base: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.base is not None
        return self.base.clone()


@dataclass
class OneLinear:
    """A fused linear `p` of the parts p0, p1, … with adapters of the ranks given: a rank a part, 0 for none."""

    in_features: int
    widths: Sequence[int]
    ranks: Sequence[Sequence[int]]
    layer: torch.dtype = torch.float32
    adapter: Dtype = "F32"
    device: str = "cpu"
    page_bytes: int = 1 << 14
    n_pages: int = 400
    engine_options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = {f"p{i}": nn.Linear(self.in_features, n, device="meta") for i, n in enumerate(self.widths)}
        base = BaseSpec.from_module(nn.ModuleDict(parts), id="tests/linear", revision="e" * 40)
        self.cache = StaticCache(
            base, device=self.device, n_pages=self.n_pages, page_bytes=self.page_bytes,
            dtype=self.adapter, slots=max(64, len(self.ranks)),
        )  # fmt: skip
        self.model = nn.ModuleDict({"p": Fused(self.in_features, self.widths)})
        self.adapters = [self._add(index, ranks) for index, ranks in enumerate(self.ranks)]
        self.engine = self.remade(**self.engine_options)

    def remade(self, **options: object) -> LoRAEngine:
        """An engine on the layer that is there now."""
        chosen: dict[str, object] = {"kernels": "triton", **options}
        parts = [f"p{i}" for i in range(len(self.widths))]
        return LoRAEngine(self.model, self.cache, {"p": parts}, **chosen)  # type: ignore[arg-type]

    def _add(self, seed: int, ranks: Sequence[int]) -> Adapter:
        chosen = {f"p{i}": rank for i, rank in enumerate(ranks) if rank}
        return self.cache.add(chosen, seed=seed, dtype=self.adapter)

    def inputs(self, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """x and the base's y."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, self.in_features, generator=generator)
        y = torch.randn(rows, sum(self.widths), generator=generator)
        return x.to(self.device, self.layer), y.to(self.device, self.layer)

    def entries(self, owners: Owners) -> list[tuple[object, int]]:
        """A step's entries, a row each."""
        leases = [self.cache.lease(*((self.adapters[i], w) for i, w in mix)) if mix else None for mix in owners]
        return [(lease, 1) for lease in leases]

    def run(self, x: Tensor, y: Tensor, owners: Owners, **options: object) -> tuple[Tensor, Receipt]:
        self.model["p"].base = y
        with self.engine.step(self.entries(owners), **options) as step:  # type: ignore[arg-type]
            got = self.model["p"](x)
        return got, step.receipt

    def wanted(self, x: Tensor, y: Tensor, owners: Owners) -> Tensor:
        """float64, on the device."""
        total = y.double()
        by_mix: dict[tuple[tuple[int, float], ...], list[int]] = {}
        for row, mix in enumerate(owners):
            by_mix.setdefault(tuple(mix), []).append(row)
        for mix, rows in by_mix.items():
            for index, weight in mix:
                total[rows] += weight * self.delta(x[rows], index)
        return total

    def delta(self, x: Tensor, index: int) -> Tensor:
        total = torch.zeros(len(x), sum(self.widths), dtype=torch.float64, device=x.device)
        column = 0
        for part, width in enumerate(self.widths):
            factors = self.adapters[index].modules.get(f"p{part}")
            if factors is not None:
                a, b = factors.a.to(x.device).double(), factors.b.to(x.device).double()
                total[:, column : column + width] = factors.scaling * (x.double() @ a.T) @ b.T
            column += width
        return total


def alone(indices: Sequence[int]) -> list[list[tuple[int, float]]]:
    """One adapter a row, −1 for the base."""
    return [[(i, 1.0)] if i >= 0 else [] for i in indices]


def close(got: Tensor, wanted: Tensor, *, ulps: float = 2.0) -> None:
    """Within `ulps` of the layer's dtype at the largest value of the row, and nowhere NaN."""
    eps = torch.finfo(got.dtype).eps if got.dtype != torch.float32 else 4e-6
    room = ulps * eps * wanted.abs().amax(dim=1, keepdim=True).clamp_min(1.0)
    off = (got.double() - wanted).abs()
    assert bool((off <= room).all()), f"off by {float((off / room).nan_to_num(1e9).max()):.3g} times what is allowed"
