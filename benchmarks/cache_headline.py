"""C8: a Llama with Llama-3.1-8B's shapes and random weights, 2,000 adapters against 5 against none.

Ranks 8, 16, 32 and 64 in turn, requests by Zipf 1.0, steps of 64 rows, each row over 256 tokens of context. A
quarter of the adapters' bytes fits into VRAM, as with all 32 layers on this card, and an eighth into the host slab.
Packages of 2,000 adapters would take hundreds of gigabytes, so a loader in memory stands for disk and checks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from benchmarks.cache_adapters import LLAMA_LAYERS, MadeUpLoader, Shape
from benchmarks.cache_common import Bench, Part
from benchmarks.cache_overcommit import told
from benchmarks.cache_requests import RequestLoop, Rows, refs_of, zipf
from benchmarks.cache_worlds import loaded, made_up_cache

from adapterd.gpu_cache import AdapterCache
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec

MANY, FEW = 2000, 5
RANKS = (8, 16, 32, 64)
ROWS = 64
TOKENS = 128


@torch.inference_mode()
def measure(bench: Bench) -> Part:
    part = Part()
    layers = bench.pick(bench.layers, 1)
    many = bench.pick(MANY, 40)
    found: dict[str, Any] = {}
    with bench.serving_stream():
        model = _Model(bench, layers)
        bench.say(f"C8 model of {layers} layers is there")
        loader = MadeUpLoader(model.base, [Shape(RANKS[i % 4]) for i in range(many)], bench.page_bytes)
        sizes = {"vram_pages": loader.pages // 4, "host_pages": loader.pages // 8, "max_residents": many}
        with made_up_cache(bench, loader, **sizes) as cache:
            refs = [v.pinned for v in loader.versions]
            found["none"] = _serve(bench, cache, model, None, repeat(None))
            with LoRAEngine(model.inner, cache) as engine:
                found["base rows"] = _serve(bench, cache, model, engine, repeat(None))
                _serve(bench, cache, model, engine, refs_of(zipf(FEW, 3), refs))  # kernels are compiled
                found[f"{FEW}"] = _serve(bench, cache, model, engine, refs_of(zipf(FEW, 3), refs))
                _warm(cache, refs, bench.pick(300, 10))
                _serve(bench, cache, model, engine, refs_of(zipf(many, 3), refs))
                found[f"{many}"] = _serve(bench, cache, model, engine, refs_of(zipf(many, 3), refs))
            part.data["statistics"] = repr(cache.statistics())
    part.data |= {"layers": layers, "adapters": many, "bytes_of_all": loader.pages * bench.page_bytes, "found": found}
    speed = {name: result["tokens_per_second"] for name, result in found.items()}
    part.add("C8", f"tokens/s with {many} adapters over {FEW}", speed[f"{many}"] / speed[f"{FEW}"], least=0.95)
    part.add("C8", f"tokens/s with {many} adapters over none", speed[f"{many}"] / speed["none"], least=0.85)
    part.add("C8", f"tokens/s with {FEW} adapters over none", speed[f"{FEW}"] / speed["none"])
    part.add("C8", "tokens/s of base rows in steps over none", speed["base rows"] / speed["none"])
    part.add("C8", "tokens/s with none", speed["none"], "tokens/s")
    part.notes.append(
        f"C8: {layers} of {LLAMA_LAYERS} layers; a loader in memory instead of packages. The model runs eagerly, so "
        "each linear's launches cost time on the CPU; with none, it has no hooks. The kernels are Triton's on CUDA."
    )
    return part


class _Model:
    """LlamaForCausalLM with random weights, and a context that every step decodes behind.

    Attributes:
        inner: the model. base: its table.
    """

    def __init__(self, bench: Bench, layers: int) -> None:
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

        wide = not bench.small
        config = LlamaConfig(
            vocab_size=128_256 if wide else 128,
            hidden_size=4096 if wide else 64,
            intermediate_size=14_336 if wide else 224,
            num_hidden_layers=layers,
            num_attention_heads=32 if wide else 4,
            num_key_value_heads=8 if wide else 2,
            max_position_embeddings=4096,
        )
        dtype = torch.bfloat16 if bench.cuda else torch.float32
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(bench.device):
                self.inner = LlamaForCausalLM(config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(usual)
        self.base = BaseSpec.from_module(self.inner, id="benchmarks/llama-8b", revision="6" * 40)
        self._context = bench.pick(256, 8)
        self._past = DynamicCache()
        tokens = torch.randint(0, config.vocab_size, (ROWS, self._context), device=bench.device)
        self.inner.model(input_ids=tokens, past_key_values=self._past, use_cache=True)
        self._tokens = tokens[:, :1].contiguous()

    def step(self) -> None:
        """One token for every row; returns when they are there."""
        logits = self.inner(input_ids=self._tokens, past_key_values=self._past, use_cache=True).logits
        self._tokens = logits[:, -1:].argmax(-1)
        self._past.crop(-1)  # the token that this step added
        self._tokens[0, 0].item()


def _serve(
    bench: Bench,
    cache: AdapterCache,
    model: _Model,
    engine: LoRAEngine[Any] | None,
    wanted: Iterator[str | None],
) -> dict[str, Any]:
    def run(rows: Rows) -> None:
        if engine is None:
            model.step()
            return
        with engine.step(rows):
            model.step()

    loop = RequestLoop(cache, wanted, run, slots=ROWS, tokens=bench.pick(TOKENS, 4), ahead=16)
    loop.serve(seconds=bench.pick(3, 1), steps=bench.pick(30, 3))
    served = loop.serve(seconds=bench.pick(10, 2), steps=bench.pick(400, 8))
    loop.stop()
    found = told(served)
    bench.say(f"C8 {found}")
    return found


def _warm(cache: AdapterCache, refs: list[str], count: int) -> None:
    """The most wanted are in VRAM; the most wanted last."""
    began = time.perf_counter()
    for ref in reversed(refs[:count]):
        for lease in loaded(cache, [ref]):
            lease.release()
        if time.perf_counter() - began > 15:
            return
