"""What the demo's rows must be, worked out by plain means: float64, merged weights, the source files.

Nothing of adapterd is imported here, so that the comparison cannot share a mistake with the engine
(`tests/cli/test_demo.py` holds this).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

PREFIX = "base_model.model."


def merged_logits(
    model: torch.nn.Module, parts: Sequence[tuple[Path, float]], input_ids_T: torch.Tensor
) -> torch.Tensor:
    """Logits [T, vocab] in float64 of `model` with `weight · scaling · B A` of each part added to its weights.

    Args:
        model: the base, of any dtype; it is copied, not changed.
        parts: (adapter folder, weight) of a composition; empty for the base.
        input_ids_T: one prompt.
    """
    reference = copy.deepcopy(model).cpu().double()
    modules = dict(reference.named_modules())
    for folder, weight in parts:
        for name, delta in adapter_deltas(folder).items():
            linear = modules[name]
            assert isinstance(linear, torch.nn.Linear)
            linear.weight.data += weight * delta
    with torch.no_grad():
        output = reference(input_ids=input_ids_T[None].cpu())
    logits: torch.Tensor = output.logits[0]
    return logits


def adapter_deltas(folder: Path) -> Mapping[str, torch.Tensor]:
    """Module name → scaling · B A in float64, read from `folder`'s two files by PEFT's documented rules."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {k: v.double() for k, v in load_file(folder / "adapter_model.safetensors").items()}
    names = [k.removeprefix(PREFIX).removesuffix(".lora_A.weight") for k in tensors if k.endswith(".lora_A.weight")]
    return {name: _scaling(config, name) * _product(tensors, name) for name in names}


def _product(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    return tensors[f"{PREFIX}{name}.lora_B.weight"] @ tensors[f"{PREFIX}{name}.lora_A.weight"]


def _scaling(config: Mapping[str, object], name: str) -> float:
    rank = int(_by_pattern(config, "rank_pattern", name, "r"))
    alpha = _by_pattern(config, "alpha_pattern", name, "lora_alpha")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(config: Mapping[str, object], pattern: str, name: str, default: str) -> float:
    """The demo's patterns are plain last names, so that no regex rule is needed here."""
    table = config.get(pattern) or {}
    assert isinstance(table, dict)
    return float(table.get(name.rsplit(".", 1)[-1], config[default]))
