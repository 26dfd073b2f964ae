"""The demo's world: a small transformer, two tenants, and adapters of different rank and scaling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    import torch

BASE_ID = "demo/tiny-llama"
BASE_REVISION = "1" * 40
OTHER_REVISION = "2" * 40
VOCABULARY = 128
HIDDEN = 64
KV = 32
MLP = 128
LAYERS = 2

SHAPES: Mapping[str, tuple[int, int]] = {  # last name -> (in_features, out_features)
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, MLP),
    "mlp.up_proj": (HIDDEN, MLP),
    "mlp.down_proj": (MLP, HIDDEN),
}


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """One adapter to publish. `rank_pattern` is by last name, as in PEFT's config."""

    tenant: str
    name: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    revision: str = BASE_REVISION

    @property
    def ref(self) -> str:
        return f"{self.tenant}/{self.name}"


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = (
    AdapterPlan("acme", "finance", 8, 16, ("q_proj", "v_proj"), seed=11),
    AdapterPlan("acme", "legal", 4, 8, ALL, seed=12, use_rslora=True),
    AdapterPlan(
        "globex",
        "code",
        16,
        32,
        ("gate_proj", "up_proj", "down_proj"),
        seed=21,
        rank_pattern={"down_proj": 2},
    ),
)
FOREIGN_BASE = AdapterPlan("acme", "elsewhere", 8, 16, ("q_proj",), seed=14, revision=OTHER_REVISION)


def write_adapter(plan: AdapterPlan, folder: Path) -> Path:
    """The two files that PEFT writes for such an adapter. Returns `folder`."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(plan.seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for layer in range(LAYERS):
        for module, (n_in, n_out) in SHAPES.items():
            last = module.rsplit(".", 1)[-1]
            if last not in plan.targets:
                continue
            rank = plan.rank_pattern.get(last, plan.rank)
            key = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{key}.lora_A.weight"] = random.normal(0, 0.2, (rank, n_in)).astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = random.normal(0, 0.2, (n_out, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(_config(plan), indent=2))
    return folder


def _config(plan: AdapterPlan) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE_ID,
        "revision": plan.revision,
        "r": plan.rank,
        "lora_alpha": plan.alpha,
        "use_rslora": plan.use_rslora,
        "rank_pattern": dict(plan.rank_pattern),
        "alpha_pattern": {},
        "target_modules": list(plan.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def build_base(folder: Path) -> torch.nn.Module:
    """A Llama with random weights, saved to `folder` as a real model directory, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = LlamaForCausalLM(config)
        model.train(False)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    module: torch.nn.Module = model
    return module
