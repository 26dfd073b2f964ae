"""Whole packages in memory: sound ones, nearly valid ones, and ones that hold what does not belong there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from hypothesis import strategies as st

from adapterd.loader.formats.files import BytesReader
from fakes.packages import (
    PREFIX,
    lora_factors,
    peft_config,
    safetensors_bytes,
    tensors_of,
    tiny_llama_spec,
    write_package,
)
from strategies.configs import near_configs
from strategies.headers import near_headers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAMES = (
    "README.md", "adapter_model.bin", "optimizer.pt", "training_args.bin", "tokenizer.json", "model.sig",
    ".gitattributes", "adapter_model.safetensors.index.json", "checkpoint-1/adapter_model.safetensors",
    "Copy of adapter_config.json", "adapter_model (1).safetensors", "../adapter_config.json",
    "ADAPTER_CONFIG.JSON", "sub/", "é.txt", "x" * 300, "a\n.md",
)  # fmt: skip


class MemoryPackage:
    """Implements `loader.formats.files.Package` over a dict."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(files)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._files, key=lambda n: n.encode("utf-8", "surrogatepass")))

    def sizes(self) -> Mapping[str, int]:
        return {name: 0 if name.endswith("/") else len(data) for name, data in self._files.items()}

    def open(self, name: str) -> BytesReader:
        return BytesReader(self._files[name], name)


@cache
def sound_files(rank: int, dtype: str, seed: int) -> Mapping[str, bytes]:
    """A package that is accepted without a warning."""
    with tempfile.TemporaryDirectory() as folder:
        write_package(Path(folder), rank=rank, dtype=dtype, seed=seed)
        return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


def _weights(random: Random, slip: int) -> bytes:
    base = tiny_llama_spec()
    paths = [m.path for m in base.modules if m.path.endswith(("q_proj", "v_proj"))]
    tensors = tensors_of(lora_factors(base, paths, dict.fromkeys(paths, 2), "F32", random.randrange(9)))
    name = random.choice(list(tensors))
    value = tensors[name]
    match slip:
        case 0:
            del tensors[name]
        case 1:
            tensors[random.choice(("x", name.replace(".weight", ""), name.replace(PREFIX, ""), PREFIX + name))] = value
        case 2:
            tensors[name] = value.T.copy()
        case 3:
            tensors[name] = value.astype(random.choice((np.float64, np.float16, np.int8)))
        case 4:
            value[random.randrange(value.shape[0]), 0] = random.choice((np.nan, np.inf, -np.inf, 3e38, 1e-40))
        case 5:
            for key in tensors:
                if "lora_B" in key:
                    tensors[key] = np.zeros_like(tensors[key])
        case 6:
            tensors[name] = np.zeros((*value.shape, 1), value.dtype)
        case 7:
            tensors[name.replace("q_proj", "w_proj").replace("v_proj", "lm_head")] = value
    return safetensors_bytes(tensors)


@st.composite
def near_packages(draw: st.DrawFn) -> dict[str, bytes]:
    """A sound package with a slip in its tensors, its config, its header or its names."""
    random = Random(draw(st.integers(0, 2**32 - 1)))
    files = dict(sound_files(2, random.choice(("F32", "F16", "BF16")), 0))
    match draw(st.sampled_from(("tensors", "tensors", "config", "header", "names", "both"))):
        case "tensors":
            files[WEIGHTS] = _weights(random, draw(st.integers(0, 7)))
        case "config":
            files[CONFIG] = draw(near_configs())
        case "header":
            files[WEIGHTS] = draw(near_headers()).file
        case "names":
            for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)):
                files[name] = b"" if name.endswith("/") else b"x"
            if draw(st.booleans()):
                files.pop(random.choice((CONFIG, WEIGHTS)))
        case "both":
            files[WEIGHTS] = _weights(random, draw(st.integers(0, 7)))
            config = peft_config(tiny_llama_spec(), 2, draw(st.sampled_from((0, 8, -8, 1e38))), ["q_proj", "v_proj"])
            files[CONFIG] = json.dumps(config).encode()
    return files


def sound_packages() -> st.SearchStrategy[Mapping[str, bytes]]:
    """Accepted."""
    return st.builds(
        sound_files, st.sampled_from((1, 2, 4)), st.sampled_from(("F32", "F16", "BF16")), st.integers(0, 3)
    )


def packages() -> st.SearchStrategy[Mapping[str, bytes]]:
    """Any of them."""
    return st.one_of(sound_packages(), near_packages(), near_packages(), near_packages())
