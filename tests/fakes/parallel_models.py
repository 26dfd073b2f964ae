"""A row-wise network and its shards: what frameworks with local weights and explicit reductions give an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.sharding import Rule, Sharding

HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, VOCABULARY = 48, 8, 2, 6, 96, 64
STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
Reduce = Callable[[Tensor], object]
Style = Literal["outside", "inside"]
"""Where row-parallel linears are reduced: by the layer around them, or by their own forward."""
SPLITS = {
    "q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row",
    "gate_proj": "column", "up_proj": "column", "down_proj": "row", "lm_head": "column",
}  # fmt: skip


@dataclass(frozen=True)
class Split:
    """How a network is cut; `reduce` sums over the ranks, in place."""

    rank: int = 0
    size: int = 1
    reduce: Reduce | None = None
    style: Style = "outside"
    fused: bool = False


def sharding(rank: int, size: int) -> Sharding:
    """The rules of `shard`: key and value heads that are fewer than ranks are held by neighbours."""
    rules = []
    for name, axis in SPLITS.items():
        slices = min(size, KV_HEADS) if name in {"k_proj", "v_proj"} else size
        rules.append(Rule(name, axis, slices))  # type: ignore[arg-type]
    return Sharding(rank, size, tuple(rules))


class ReducingLinear(nn.Linear):
    """A row-parallel linear whose own forward ends with the reduction."""

    reduce: Reduce

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.reduce(y)
        return y


class Block(nn.Module):
    """Two residual parts: o(tanh(q) · k + v), the keys and values shared by groups of heads, and down(gate · up)."""

    def __init__(self, split: Split = Split()) -> None:
        super().__init__()
        self.split = split
        heads, kv = HEADS // split.size, max(KV_HEADS // split.size, 1)
        self.widths, inner = [heads * WIDTH, kv * WIDTH, kv * WIDTH], INNER // split.size
        if split.fused:
            self.qkv_proj = nn.Linear(HIDDEN, sum(self.widths), bias=False)
            self.gate_up_proj = nn.Linear(HIDDEN, 2 * inner, bias=False)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, n, bias=False) for n in self.widths)
            self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, inner, bias=False) for _ in range(2))
        self.o_proj, self.down_proj = self._row(heads * WIDTH), self._row(inner)

    def _row(self, in_features: int) -> nn.Linear:
        if self.split.reduce is None or self.split.style == "outside":
            return nn.Linear(in_features, HIDDEN, bias=False)
        linear = ReducingLinear(in_features, HIDDEN, bias=False)
        linear.reduce = self.split.reduce
        return linear

    def forward(self, x: Tensor) -> Tensor:
        if self.split.fused:
            q, k, v = self.qkv_proj(x).split(self.widths, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (part.unflatten(-1, (-1, WIDTH)) for part in (q, k, v))
        shared = q.shape[-2] // k.shape[-2]
        mixed = torch.tanh(q) * k.repeat_interleave(shared, dim=-2) + v.repeat_interleave(shared, dim=-2)
        x = x + self._whole(self.o_proj(mixed.flatten(-2)))
        if self.split.fused:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return x + self._whole(self.down_proj(torch.sigmoid(gate) * up))

    def _whole(self, y: Tensor) -> Tensor:
        if self.split.reduce is not None and self.split.style == "outside":
            self.split.reduce(y)
        return y


class Network(nn.Module):
    """Two blocks and a head; [rows, 48] to this rank's part of [rows, 64]."""

    def __init__(self, split: Split = Split()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(split) for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY // split.size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def network(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Network:
    """The whole one, seeded."""
    torch.manual_seed(11)
    return Network().to(device, dtype).eval().requires_grad_(False)


def network_spec() -> BaseSpec:
    """The whole one's table."""
    return BaseSpec.from_module(Network(), id="tests/network", revision="b" * 40)


def shard(whole: Network, split: Split) -> Network:
    """This rank's part of `whole`, with weights of its own."""
    sample = next(whole.parameters())
    part = Network(split).to(sample.device, sample.dtype).eval().requires_grad_(False)
    for path, module in part.named_modules():
        if isinstance(module, nn.Linear):
            prefix, _, name = path.rpartition(".")
            names = STACKED.get(name, [name])
            pieces = [_piece(whole, f"{prefix}.{n}".lstrip("."), split) for n in names]
            module.weight.copy_(torch.cat(pieces))
    return part


def _piece(whole: Network, path: str, split: Split) -> Tensor:
    weight = whole.get_submodule(path).weight
    assert isinstance(weight, Tensor)
    name = path.rpartition(".")[2]
    slices = min(split.size, KV_HEADS) if name in {"k_proj", "v_proj"} else split.size
    return weight.chunk(slices, dim=0 if SPLITS[name] == "column" else 1)[split.rank * slices // split.size]


def save_llama(folder: Path) -> None:
    """A tiny model directory: 4 heads, 2 key heads, seeded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.15,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
