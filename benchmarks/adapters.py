"""Large adapters of random values, made fast: for benchmarks only."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind

# A decoder layer with hidden size 8192, 8 key-value heads of 128 and a feed-forward of 28672 (Llama-70B's).
LAYER = {
    "self_attn.q_proj": (8192, 8192), "self_attn.k_proj": (8192, 1024), "self_attn.v_proj": (8192, 1024),
    "self_attn.o_proj": (8192, 8192), "mlp.gate_proj": (8192, 28672), "mlp.up_proj": (8192, 28672),
    "mlp.down_proj": (28672, 8192),
}  # fmt: skip
WIDTHS = sum(n + m for n, m in LAYER.values())
REVISION = "7" * 40
# Sign and mantissa at random, magnitudes from 2⁻⁷ to 2⁻³: (mask, exponent bits) on words of that many bytes.
BITS = {"BF16": (0x817F, 0x3C00), "F16": (0x8FFF, 0x2000), "F32": (0x817FFFFF, 0x3C000000)}
BYTES = {"BF16": 2, "F16": 2, "F32": 4}


def layers_for(total_bytes: int, rank: int, dtype: str) -> int:
    """How many layers make an adapter of about that size."""
    return max(round(total_bytes / (WIDTHS * rank * BYTES[dtype])), 1)


def base_of(layers: int) -> BaseSpec:
    """The base that the adapter is for."""
    modules = [
        BaseModule(f"model.layers.{i}.{name}", ModuleKind.LINEAR, n, m)
        for i in range(layers)
        for name, (n, m) in LAYER.items()
    ]
    return BaseSpec.of(modules, id="benchmarks/wide", revision=REVISION)


def write_adapter(folder: Path, total_bytes: int, rank: int, dtype: str, seed: int = 1) -> BaseSpec:
    """A package of about `total_bytes` in `folder`, and its base."""
    layers = layers_for(total_bytes, rank, dtype)
    shapes: dict[str, tuple[int, int]] = {}
    for i in range(layers):
        for name, (n, m) in LAYER.items():
            path = f"base_model.model.model.layers.{i}.{name}"
            shapes |= {f"{path}.lora_A.weight": (rank, n), f"{path}.lora_B.weight": (m, rank)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    mask, exponent = BITS[dtype]
    word = np.uint16 if BYTES[dtype] == 2 else np.uint32
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            values = rng.integers(0, np.iinfo(word).max, math.prod(shape), word, endpoint=True)
            file.write((values & word(mask) | word(exponent)).tobytes())
    config = {
        "peft_type": "LORA", "base_model_name_or_path": "benchmarks/wide", "revision": REVISION, "r": rank,
        "lora_alpha": rank, "target_modules": sorted({n.rpartition(".")[2] for n in LAYER}), "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return base_of(layers)
