"""C6: more adapters than fit. The same requests (Zipf 1.0) with room for all adapters, a half and a tenth of them.

A toy stack of linears with the engine on it, run eagerly; every adapter is in the host slab. Both sides of a ratio
use the same kernels: Triton's on CUDA, else the torch reference.
"""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.cache_adapters import MadeUpLoader, Shape
from benchmarks.cache_common import Bench, Part, summary
from benchmarks.cache_requests import RequestLoop, Rows, Served, refs_of, zipf
from benchmarks.cache_worlds import loaded, made_up_cache
from torch import Tensor, nn

from adapterd.gpu_cache import AdapterCache
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec

GOALS = {2: 0.8, 10: 0.5}
ROWS = 64


class Stack(nn.Module):
    """tanh(W x), a few times."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        width = bench.pick(4096, 64)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(bench.pick(8, 2)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@torch.inference_mode()
def measure(bench: Bench) -> Part:
    part = Part()
    torch.manual_seed(1)
    with torch.device(bench.device):
        model = Stack(bench).to(torch.bfloat16 if bench.cuda else torch.float32).eval().requires_grad_(False)
    base = BaseSpec.from_module(model, id="benchmarks/stack", revision="9" * 40)
    count = bench.pick(640, 160)
    loader = MadeUpLoader(base, [Shape(bench.pick(64, 4))] * count, bench.page_bytes)
    each = loader.versions[0].layout.n_pages
    part.data["adapters"] = {"count": count, "pages of each": each, "rows": ROWS}
    found: dict[int, dict[str, Any]] = {}
    with bench.serving_stream():
        for times in (1, *GOALS):
            sizes = {"vram_pages": count // times * each, "host_pages": count * each, "max_residents": count}
            with made_up_cache(bench, loader, **sizes) as cache, LoRAEngine(model, cache) as engine:
                found[times] = _serve(bench, cache, engine, model, loader)
                if times == 1:
                    part.data["all resident, again"] = _serve(bench, cache, engine, model, loader)
            part.data[f"{times}× the capacity"] = found[times]
            bench.say(f"C6 {times}× the capacity: {found[times]}")
    again = part.data["all resident, again"]
    for times, least in GOALS.items():
        mine, all_of = found[times], found[1]
        ratio = mine["tokens_per_second"] / all_of["tokens_per_second"]
        part.add("C6", f"{count} adapters, {times}× what fits: tokens/s over all resident", ratio, least=least)
        part.add("C6", f"{times}×: p99 of a step over all resident", mine["p99_us"] / all_of["p99_us"], most=1.10)
        part.add("C6", f"{times}×: p50 of a step over all resident", mine["p50_us"] / all_of["p50_us"])
    part.add("C6", "all resident, again: tokens/s", again["tokens_per_second"] / found[1]["tokens_per_second"])
    part.add("C6", "all resident, again: p99 of a step", again["p99_us"] / found[1]["p99_us"])
    part.notes.append("C6: 10 % is what we take for “unchanged”; see the second run with all resident for the noise.")
    return part


def _serve(
    bench: Bench, cache: AdapterCache, engine: LoRAEngine[Any], model: Stack, loader: MadeUpLoader
) -> dict[str, Any]:
    refs = [v.pinned for v in loader.versions]
    x = torch.randn(ROWS, model.layers[0].in_features, device=bench.device, dtype=model.layers[0].weight.dtype)

    def run(rows: Rows) -> None:
        with engine.step(rows):
            y = model(x)
        y[0, 0].item()  # the tokens are there

    for ref in reversed(refs):  # all in the slab, the most wanted in VRAM
        for lease in loaded(cache, [ref]):
            lease.release()
    loop = RequestLoop(cache, refs_of(zipf(len(refs), 3), refs), run, slots=ROWS)
    loop.serve(seconds=bench.pick(2, 1), steps=bench.pick(60, 5))
    before = cache.statistics()
    served = loop.serve(seconds=bench.pick(8, 2), steps=bench.pick(400, 20))
    after = cache.statistics()
    loop.stop()
    return {**told(served), "host_hits": after.host_hits - before.host_hits, "misses": after.misses - before.misses}


def told(served: Served) -> dict[str, Any]:
    """For the file."""
    steps = len(served.walls)
    return {
        **summary(served.walls),
        "tokens_per_second": served.tokens_per_second,
        "rows_a_step": sum(served.rows) / steps,
        "adapters_a_step": sum(served.distinct) / steps,
    }
