"""Checkpoints whose linears are packed as the field packs them, and live models with such linears; by hand.

The numbers are nonsense; names, dtypes and shapes are those that GPTQ, AWQ, bitsandbytes and
compressed-tensors write for 4 or 8 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

GROUP = 16


def _int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def gptq(n_in: int, n_out: int) -> dict[str, Tensor]:
    return {
        "qweight": _int32(n_in // 8, n_out), "qzeros": _int32(n_in // GROUP, n_out // 8),
        "scales": torch.zeros(n_in // GROUP, n_out, dtype=torch.float16), "g_idx": _int32(n_in),
    }  # fmt: skip


def awq(n_in: int, n_out: int) -> dict[str, Tensor]:
    return {
        "qweight": _int32(n_in, n_out // 8), "qzeros": _int32(n_in // GROUP, n_out // 8),
        "scales": torch.zeros(n_in // GROUP, n_out, dtype=torch.float16),
    }  # fmt: skip


def nf4(n_in: int, n_out: int) -> dict[str, Tensor]:
    return {
        "weight": torch.zeros(n_in * n_out // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(n_in * n_out // 64), "weight.quant_map": torch.zeros(16),
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(82, dtype=torch.uint8),
    }  # fmt: skip


def int8(n_in: int, n_out: int) -> dict[str, Tensor]:
    return {"weight": torch.zeros(n_out, n_in, dtype=torch.int8), "SCB": torch.zeros(n_out)}


def packed(n_in: int, n_out: int) -> dict[str, Tensor]:
    return {
        "weight_packed": _int32(n_out, n_in // 8), "weight_scale": torch.zeros(n_out, n_in // GROUP),
        "weight_shape": torch.tensor([n_out, n_in]),
    }  # fmt: skip


LAYOUTS: Mapping[str, Callable[[int, int], dict[str, Tensor]]] = {
    "gptq": gptq, "awq": awq, "bitsandbytes": nf4, "bitsandbytes_8bit": int8, "compressed-tensors": packed,
}  # fmt: skip


class PackedLinear(nn.Module):
    """A quantised linear as the field writes them: it derives from nothing and knows its widths."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features


def quantise(model: nn.Module) -> nn.Module:
    """The model with every linear but its head packed, in place."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path != "lm_head":
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, PackedLinear(module.in_features, module.out_features))
    return model


def write_quantised(model: nn.Module, folder: Path, layout: str, *, announced: bool = True) -> Path:
    """`model` as a checkpoint in that layout; without `announced`, the config keeps silent about it."""
    stored: dict[str, Tensor] = {}
    linears = {p for p, m in model.named_modules() if isinstance(m, nn.Linear) and p != "lm_head"}
    for name, tensor in model.state_dict().items():
        path, _, last = name.rpartition(".")
        if path in linears and last == "weight":
            n_out, n_in = tensor.shape
            stored |= {f"{path}.{part}": t for part, t in LAYOUTS[layout](n_in, n_out).items()}
        else:
            stored[name] = tensor.clone().contiguous()
    config = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[operator,union-attr]
    config["architectures"] = [type(model).__name__]
    if announced:
        config["quantization_config"] = {"quant_method": layout, "bits": 4, "group_size": GROUP}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    return folder
