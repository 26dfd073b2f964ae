"""A tiny llama's checkpoint with seeded values, written without torch, and one merge over it by the loader's rooms."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from adapterd.loader.base_model import BaseSpec, ModuleKind
from adapterd.loader.checks import examine
from adapterd.loader.formats.files import DirectoryPackage
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.merge import Plan, Wish, new_folder, opened_base, plan_merge
from fakes.packages import NUMPY_DTYPES, safetensors_bytes, tiny_llama_spec

BASE = tiny_llama_spec()
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
WEIGHTS = "adapter_model.safetensors"


def base_tensors(dtype: str = "BF16", seed: int = 5) -> dict[str, np.ndarray]:
    """Every weight of the table [out, in], and norms; seeded."""
    rng = np.random.default_rng(seed)
    found = {}
    for module in BASE.modules:
        rows, columns = module.out_features, module.in_features
        if module.kind is ModuleKind.EMBEDDING:
            rows, columns = columns, rows
        found[f"{module.path}.weight"] = rng.normal(0, 0.1, (rows, columns)).astype(NUMPY_DTYPES[dtype])
    for layer in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{norm}.weight"] = np.ones(32, NUMPY_DTYPES[dtype])
    return found | {"model.norm.weight": np.ones(32, NUMPY_DTYPES[dtype])}


def write_base(
    folder: Path,
    *,
    dtype: str = "BF16",
    sharded: bool = True,
    tensors: Mapping[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """The checkpoint, with a tokenizer's file and a licence beside it. `config` replaces, `...` removes a field."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = dict(tensors if tensors is not None else base_tensors(dtype))
    body = {name: value for name, value in {**CONFIG, **config}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(body, indent=1))
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    (folder / "LICENSE").write_bytes(b"free as in beer\r\n")
    if not sharded:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
        return folder
    names = list(stored)
    halves = dict(zip(SHARDS, (names[::2], names[1::2]), strict=True))
    for shard, listed in halves.items():
        (folder / shard).write_bytes(safetensors_bytes({n: stored[n] for n in listed}, {"format": "pt", "note": shard}))
    places = {n: shard for shard, listed in halves.items() for n in listed}
    total = sum(t.nbytes for t in stored.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))
    return folder


def merge(
    base: Path, adapter: Path, out: Path, *, spec: BaseSpec = BASE, progress: list[int] | None = None, **wish: Any
) -> Plan:
    """Examine the adapter, plan, and write the folder `out`."""
    told = progress if progress is not None else []
    with DirectoryPackage.open_dir(adapter, DEFAULT_LIMITS) as package, opened_base(base) as folder:
        verdict = examine(package, spec)
        assert verdict.manifest is not None, verdict.problems
        plan = plan_merge(folder, spec, verdict.manifest, package.open(WEIGHTS), replace(Wish(), **wish))
        new_folder(plan.model, out, base, told.append)
    return plan


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of all files, by a reader of a few lines."""
    words = {**NUMPY_DTYPES, "I32": np.dtype("<i4"), "U8": np.dtype("u1"), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, info in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + x for x in info["data_offsets"])
                found[name] = np.frombuffer(data[begin:end], words[info["dtype"]]).reshape(info["shape"])
    return found


def span_of(file: Path, tensor: str) -> tuple[int, int]:
    """First byte of a tensor in its file, and the one after the last."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    begin, end = json.loads(data[8 : 8 + length])[tensor]["data_offsets"]
    return 8 + length + begin, 8 + length + end
