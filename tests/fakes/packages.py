"""Small adapter packages with seeded values, written as PEFT writes them; without torch or PEFT."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind

PREFIX = "base_model.model."
TINY_ID = "tests/tiny-llama"
TINY_REVISION = "7" * 40
NUMPY_DTYPES: Mapping[str, Any] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"), "I64": np.dtype("<i8"), "I8": np.dtype("i1"),
}  # fmt: skip
TINY_LINEARS: Mapping[str, tuple[int, int]] = {
    "self_attn.q_proj": (32, 32), "self_attn.k_proj": (32, 16), "self_attn.v_proj": (32, 16),
    "self_attn.o_proj": (32, 32), "mlp.gate_proj": (32, 64), "mlp.up_proj": (32, 64),
    "mlp.down_proj": (64, 32),
}  # fmt: skip


def tiny_llama_spec(revision: str = TINY_REVISION, layers: int = 2) -> BaseSpec:
    """A llama: hidden size 32, 4 heads, 2 kv heads, feed-forward 64, vocabulary 96, head not tied."""
    modules = [
        BaseModule("lm_head", ModuleKind.LINEAR, 32, 96),
        BaseModule("model.embed_tokens", ModuleKind.EMBEDDING, 96, 32),
    ]
    for layer in range(layers):
        for name, (n, m) in TINY_LINEARS.items():
            modules.append(BaseModule(f"model.layers.{layer}.{name}", ModuleKind.LINEAR, n, m))
    return BaseSpec.of(modules, id=TINY_ID, revision=revision)


@dataclass(frozen=True)
class WrittenPackage:
    """What `write_package` put into a folder.

    Attributes:
        directory: the folder.
        factors: module path → (A [rank, in], B [out, rank]) as stored, in the file's dtype.
        config: adapter_config.json as written.
    """

    directory: Path
    factors: dict[str, tuple[np.ndarray, np.ndarray]]
    config: dict[str, Any]


def safetensors_bytes(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """A well-formed safetensors file, tensors in the given order."""
    words = {dtype: word for word, dtype in NUMPY_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    blobs, position = [], 0
    for name, value in tensors.items():
        blob = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": words[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [position, position + len(blob)],
        }
        blobs.append(blob)
        position += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(blobs)


def lora_factors(
    base: BaseSpec, modules: Sequence[str], ranks: Mapping[str, int], dtype: str, seed: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Seeded A [rank, in] and B [out, rank] for each module path."""
    rng = np.random.default_rng(seed)
    result = {}
    for path in modules:
        module = base.module(path)
        assert module is not None, f"{path} is not in the base"
        a = rng.normal(0, 0.2, (ranks[path], module.in_features)).astype(NUMPY_DTYPES[dtype])
        b = rng.normal(0, 0.2, (module.out_features, ranks[path])).astype(NUMPY_DTYPES[dtype])
        result[path] = (a, b)
    return result


def tensors_of(factors: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """PEFT's names for the factors, sorted as PEFT saves them."""
    named = {}
    for path, (a, b) in factors.items():
        named[f"{PREFIX}{path}.lora_A.weight"] = a
        named[f"{PREFIX}{path}.lora_B.weight"] = b
    return dict(sorted(named.items()))


def peft_config(base: BaseSpec, rank: int, alpha: float, targets: Sequence[str] | str, **over: Any) -> dict[str, Any]:
    """`adapter_config.json` as PEFT writes it for plain LoRA; `over` replaces fields, `...` removes one."""
    config: dict[str, Any] = {
        "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": base.id, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "layers_pattern": None,
        "layers_to_transform": None, "lora_alpha": alpha, "lora_bias": False, "lora_dropout": 0.0,
        "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.21.2", "r": rank, "rank_pattern": {},
        "revision": base.revision, "target_modules": list(targets),
        "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False,
    }  # fmt: skip
    config.update(over)
    return {name: value for name, value in config.items() if value is not ...}


def write_package(
    directory: Path,
    *,
    base: BaseSpec | None = None,
    rank: int = 4,
    alpha: float = 8,
    modules: Sequence[str] = ("q_proj", "v_proj"),
    ranks: Mapping[str, int] | None = None,
    dtype: str = "F32",
    seed: int = 0,
    scale: float = 1.0,
    tensors: Mapping[str, np.ndarray] | None = None,
    files: Mapping[str, bytes] | None = None,
    **config: Any,
) -> WrittenPackage:
    """Write a package into `directory` (made if it is not there) and say what is in it.

    Args:
        base: the base it is for; the tiny llama if None.
        rank, alpha: of all modules.
        modules: last name parts (`q_proj`) or whole module paths.
        ranks: module path → rank where it differs; put a `rank_pattern` into `config` with it.
        dtype: F32, F16 or BF16.
        seed: of the values; same arguments, same bytes.
        scale: factor on B.
        tensors: replaces or adds tensors under their full names.
        files: more files, name → bytes.
        config: replaces fields of the config; `...` removes one.
    """
    base = base or tiny_llama_spec()
    linears = [m.path for m in base.modules if m.kind in (ModuleKind.LINEAR, ModuleKind.CONV1D)]
    paths = [p for p in linears if any(p == m or p.endswith(f".{m}") for m in modules)]
    wanted = {path: (ranks or {}).get(path, rank) for path in paths}
    factors = lora_factors(base, paths, wanted, dtype, seed)
    factors = {p: (a, (b * np.asarray(scale, b.dtype)).astype(b.dtype)) for p, (a, b) in factors.items()}
    body = peft_config(base, rank, alpha, modules, **config)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(body, indent=2, sort_keys=True))
    stored = tensors_of(factors) | dict(tensors or {})
    (directory / "adapter_model.safetensors").write_bytes(safetensors_bytes(stored))
    for name, data in (files or {}).items():
        (directory / name).write_bytes(data)
    return WrittenPackage(directory, factors, body)
