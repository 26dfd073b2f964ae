"""C8: a Llama with Llama-3.1-8B's shapes and random weights, 2,000 adapters against 5 against none.

Ranks 8, 16, 32 and 64 in turn, requests by Zipf 1.0 through the reference worker's loop: 64 seats, prompts of 64
tokens, answers of 64 to 192. Steps are replayed graphs. A quarter of the adapters' bytes fits into VRAM, as with all
32 layers on this card, and an eighth into the host slab. Packages of 2,000 adapters would take hundreds of gigabytes,
so a loader in memory stands for disk and checks.
"""

from __future__ import annotations

import time
from itertools import repeat

import torch
from benchmarks.cache_adapters import LLAMA_LAYERS, MadeUpLoader, Shape
from benchmarks.cache_common import Bench, Part
from benchmarks.cache_model import NoEngine, TimedModel, base_of, llama, warm_engine
from benchmarks.cache_requests import ROWS, Callers, refs_of, zipf
from benchmarks.cache_steady import Steady, counted_compiles
from benchmarks.cache_worlds import loaded, made_up_cache

from adapterd.gpu_cache import AdapterCache

MANY, FEW = 2000, 5
RANKS = (8, 16, 32, 64)
KV_BLOCKS = 5120
"""64 seats of at most 16 blocks, for each of four kinds of callers, and some."""


@torch.inference_mode()
def measure(bench: Bench) -> Part:
    part = Part()
    layers, many = bench.pick(bench.layers, 1), bench.pick(MANY, 40)
    with bench.serving_stream(), counted_compiles() as compiles:
        model = llama(bench, layers)
        flat = TimedModel(bench, model, KV_BLOCKS)
        bench.say(f"C8 model of {layers} layers is there")
        loader = MadeUpLoader(base_of(model), [Shape(RANKS[i % 4]) for i in range(many)], bench.page_bytes)
        sizes = {"vram_pages": loader.pages // 4, "host_pages": loader.pages // 8, "max_residents": many}
        with made_up_cache(bench, loader, **sizes) as cache, warm_engine(model, cache, 2 * ROWS) as engine:
            refs = [v.pinned for v in loader.versions]
            _warm(cache, refs, bench.pick(300, 10))
            bench.say(f"C8 kernels and adapters are there, {compiles.count} kernels compiled or loaded")
            wanted = {
                "none": (NoEngine(), repeat(None)),
                "base rows": (engine, repeat(None)),
                f"{FEW}": (engine, refs_of(zipf(FEW, 3), refs)),
                f"{many}": (engine, refs_of(zipf(many, 3), refs)),
            }
            kinds = {name: Callers(bench, flat, by, cache, refs) for name, (by, refs) in wanted.items()}
            steady = Steady(bench, kinds, compiles)
            try:
                steady.measure()
            finally:
                for callers in kinds.values():
                    callers.loop.close()
            part.data["statistics"] = repr(cache.statistics())
        part.data["graphs"], part.data["kernels"] = repr(flat.runner.counts), compiles.count
        flat.close()
    part.data |= {"layers": layers, "adapters": many, "bytes_of_all": loader.pages * bench.page_bytes}
    part.data["found"] = steady.told()
    _figures(part, steady, f"{many}")
    spreads = f"{steady.spread(f'{many}', f'{FEW}')}; {steady.spread(f'{many}', 'none')}"
    part.notes += [
        f"C8: {layers} of {LLAMA_LAYERS} layers; a loader in memory instead of packages.",
        "C8: the reference worker's loop; “none” is the same loop without an engine. Prompts run in the same steps.",
        f"C8, spread: {spreads}; void windows: {steady.voids()}.",
    ]
    return part


def _figures(part: Part, steady: Steady, many: str) -> None:
    part.add("C8", f"tokens/s with {many} adapters over {FEW}", steady.ratio(many, f"{FEW}"), least=0.95)
    part.add("C8", f"tokens/s with {many} adapters over none", steady.ratio(many, "none"), least=0.85)
    part.add("C8", f"tokens/s with {FEW} adapters over none", steady.ratio(f"{FEW}", "none"))
    part.add("C8", "tokens/s of base rows in steps over none", steady.ratio("base rows", "none"))
    for name, run in steady.runs.items():
        told = run.told()
        part.add("C8", f"tokens/s with {name}", run.speed, "tokens/s")
        part.add("C8", f"step with {name}, mean", told["mean_us"], "µs")
        if told["gpu_us_a_step"] is not None:
            part.add("C8", f"of it the forward on the GPU with {name}", told["gpu_us_a_step"], "µs")


def _warm(cache: AdapterCache, refs: list[str], count: int) -> None:
    """The most wanted are in VRAM; the most wanted last."""
    began = time.perf_counter()
    for ref in reversed(refs[:count]):
        for lease in loaded(cache, [ref]):
            lease.release()
        if time.perf_counter() - began > 15:
            return
