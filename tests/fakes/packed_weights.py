"""Weights of small integers, packed bit by bit as GPTQ and AWQ lay them out, with what they mean in floats.

Written from the layouts' own words and for nothing but clarity: a value at a time, shifts and ors of Python's
integers. So it shares no step with the code that it tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""At which place of its word the value of each column stands."""


@dataclass(frozen=True)
class Integers:
    """One weight: scale · (value - zero), an input's group deciding which.

    Attributes:
        values: [in, out].
        zeros, scales: [groups, out]; scales are float16.
        groups: of each input.
    """

    values: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: Sequence[int]
    bits: int

    @property
    def weight(self) -> np.ndarray:
        """[out, in], float64."""
        n_in, n_out = self.values.shape
        found = np.empty((n_out, n_in))
        for i in range(n_in):
            for o in range(n_out):
                g = self.groups[i]
                found[o, i] = float(self.scales[g, o]) * (int(self.values[i, o]) - int(self.zeros[g, o]))
        return found


def random_integers(n_in: int, n_out: int, *, bits: int, group: int, seed: int, act_order: bool = False) -> Integers:
    rng = np.random.default_rng(seed)
    count = -(-n_in // group)
    groups = [i // group for i in range(n_in)]
    if act_order:
        groups = list(rng.permutation(groups))
    top = 2**bits - 1
    scales = rng.uniform(0.004, 0.03, (count, n_out)).astype(np.float16) * (16 / 2**bits)
    values, zeros = rng.integers(0, top + 1, (n_in, n_out)), rng.integers(1, top + 1, (count, n_out))
    return Integers(values, zeros, scales.astype(np.float16), groups, bits)


def gptq(weight: Integers, *, v2: bool = False, with_groups: bool = True) -> dict[str, Tensor]:
    """qweight packs inputs, qzeros outputs; the first format stores zeros less one."""
    less = 0 if v2 else 1
    tensors = {
        "qweight": _words(weight.values.T, weight.bits).T.contiguous(),
        "qzeros": _words(weight.zeros - less, weight.bits),
        "scales": torch.from_numpy(weight.scales.copy()),
    }
    if with_groups:
        tensors["g_idx"] = torch.tensor(list(map(int, weight.groups)), dtype=torch.int32)
    return tensors


def awq(weight: Integers) -> dict[str, Tensor]:
    """Both pack outputs, in an order of their own."""
    return {
        "qweight": _words(weight.values, 4, AWQ_PLACES), "qzeros": _words(weight.zeros, 4, AWQ_PLACES),
        "scales": torch.from_numpy(weight.scales.copy()),
    }  # fmt: skip


def _words(values: np.ndarray, bits: int, places: Sequence[int] | None = None) -> Tensor:
    """Along the last dimension: value k of a word at `places[k]`, or in order."""
    per = 32 // bits
    rows = []
    for row in values:
        words = []
        for first in range(0, len(row), per):
            word = 0
            for k, value in enumerate(row[first : first + per]):
                word |= int(value) << (bits * (places[k] if places else k))
            words.append(word - (1 << 32) if word >> 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def values_in(words: Tensor, bits: int, places: Sequence[int] | None = None) -> np.ndarray:
    """The inverse of packing along the last dimension, as slowly."""
    per = 32 // bits
    rows = []
    for row in words.tolist():
        found = []
        for word in row:
            found += [
                ((word & 0xFFFFFFFF) >> (bits * (places[k] if places else k))) & (2**bits - 1) for k in range(per)
            ]
        rows.append(found)
    return np.array(rows)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


def fp8(weight: Tensor, block: int = 16) -> tuple[dict[str, Tensor], Tensor]:
    """A scale a block, of its largest magnitude; and what that means, [out, in] in float64."""
    n_out, n_in = weight.shape
    stored = torch.empty(n_out, n_in, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-n_out // block), -(-n_in // block))
    means = torch.empty(n_out, n_in, dtype=torch.float64)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            place = slice(r * block, (r + 1) * block), slice(c * block, (c + 1) * block)
            scales[r, c] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[r, c]).to(torch.float8_e4m3fn)
            means[place] = stored[place].double() * scales[r, c].double()
    return {"weight": stored, "weight_scale_inv": scales}, means


def write_packed(
    model: nn.Module, folder: Path, settings: Mapping[str, Any], *, shards: int = 1, act_order: bool = False
) -> dict[str, np.ndarray]:
    """`model` as a checkpoint with every linear but its head packed; says what each packed weight means, [out, in].

    With several shards the tensors are dealt out by turns, so that the parts of a weight are in different files.
    """
    stored: dict[str, Tensor] = {}
    means: dict[str, np.ndarray] = {}
    linears = {p for p, m in model.named_modules() if isinstance(m, nn.Linear) and p != "lm_head"}
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        path, _, last = name.rpartition(".")
        if path not in linears or last != "weight":
            stored[name] = tensor.clone().contiguous()
            continue
        parts, means[path] = _packed(tensor, settings, seed, act_order=act_order)
        stored |= {f"{path}.{part}": t for part, t in parts.items()}
    config = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[operator,union-attr]
    config |= {"architectures": [type(model).__name__], "quantization_config": dict(settings)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _save(stored, folder, shards)
    return means


def _packed(
    weight: Tensor, settings: Mapping[str, Any], seed: int, *, act_order: bool
) -> tuple[dict[str, Tensor], np.ndarray]:
    if settings["quant_method"] == "fp8":
        one = settings["weight_block_size"] is None
        tensors, meant = fp8(weight, 1 << 20) if one else fp8(weight)
        if one:
            tensors["weight_scale_inv"] = tensors["weight_scale_inv"].reshape(())
        return tensors, meant.numpy()
    n_out, n_in = weight.shape
    bits, group = settings["bits"], settings["group_size"]
    made = random_integers(n_in, n_out, bits=bits, group=group, seed=seed, act_order=act_order)
    v2 = settings.get("checkpoint_format") == "gptq_v2"
    return (awq(made) if settings["quant_method"] == "awq" else gptq(made, v2=v2)), made.weight


def _save(tensors: Mapping[str, Tensor], folder: Path, shards: int) -> None:
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
        return
    names = [f"model-{k + 1:05}-of-{shards:05}.safetensors" for k in range(shards)]
    placed = {name: names[i % shards] for i, name in enumerate(tensors)}
    for shard in names:
        save_file({n: t for n, t in tensors.items() if placed[n] == shard}, folder / shard, {"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    body = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=2))
