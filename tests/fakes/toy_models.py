"""Tiny row-wise networks: every row is independent of the others, so one row can be checked alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adapterd.loader.base_model import BaseSpec

HIDDEN, KV, INNER = 48, 24, 96
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up", "mlp.down")
LINEARS = tuple(f"layers.{i}.{part}" for i in range(2) for part in PARTS)
STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
FUSED = tuple(
    (f"layers.{i}.self_attn.{name}", f"layers.{i}.self_attn.qkv_proj", row)
    for i in range(2)
    for name, row in (("q_proj", 0), ("k_proj", HIDDEN), ("v_proj", HIDDEN + KV))
)


class Attention(nn.Module):
    """Not attention, but its linears: o(tanh(q) + [k, v])."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.qkv_proj = nn.Linear(HIDDEN, HIDDEN + 2 * KV)
        else:
            self.q_proj, self.k_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, KV)
            self.v_proj = nn.Linear(HIDDEN, KV)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            q, kv = self.qkv_proj(x).split([HIDDEN, 2 * KV], dim=-1)
        else:
            q, kv = self.q_proj(x), torch.cat([self.k_proj(x), self.v_proj(x)], dim=-1)
        return self.o_proj(torch.tanh(q) + kv)


class Mlp(nn.Module):
    """down(tanh(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    """Two residual parts."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(fused=fused), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class Toy(nn.Module):
    """Two layers over the hidden state, [..., 48] to [..., 48]."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(fused=fused) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def toy(*, fused: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 3) -> Toy:
    """A seeded toy; fused and unfused ones of a seed differ in values."""
    torch.manual_seed(seed)
    return Toy(fused=fused).to(device, dtype).eval().requires_grad_(False)


def toy_spec() -> BaseSpec:
    """The table adapters know, whether or not the live model is fused."""
    return BaseSpec.from_module(Toy(), id="tests/toy", revision="a" * 40)
