"""C8: a decoder of Llama-3.1-8B's shapes and random weights, 2,000 adapters against 5 against none.

Ranks 8, 16, 32 and 64 in turn, requests by Zipf 1.0 through the reference worker's loop: 64 seats, prompts of 64
tokens, answers of 64 to 192. Steps are replayed graphs. A quarter of the adapters' bytes fits into VRAM, as with all
seven linears and 32 layers on this card. Packages of 2,000 adapters would take hundreds of gigabytes, so a loader in
memory stands for disk and checks.

It is done twice, with adapters of different modules. The ranks are those of S-LoRA's setting S2, on which its table of
2,000 adapters was made: its adapters have the attention's four linears. Adapters of all seven weigh three times as
much. (S-LoRA's requests ask for any adapter as often as for any other.)

What would be left if an adapter cost only its bytes is told, too: `none`, and the reading of what the adapters of a
step weigh, at the rate of a copy on the device. No kernel can be faster.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import repeat

import torch
from benchmarks.cache_adapters import ATTENTION, LLAMA_LAYERS, MadeUpLoader, Shape
from benchmarks.cache_common import Bench, Part, repeated
from benchmarks.cache_model import NoEngine, TimedModel, base_of, buckets, llama, warm_engine
from benchmarks.cache_requests import ROWS, Callers, refs_of, zipf
from benchmarks.cache_steady import Compiles, Steady, counted_compiles
from benchmarks.cache_worlds import AT_ONCE, made_up_cache, passed_through
from torch import nn

ADAPTED = {"attention": ATTENTION, "all seven": ()}
"""Modules of the adapters."""
MANY, FEW = 2000, 5
RANKS = (8, 16, 32, 64)
KV_BLOCKS = 5120
"""64 seats of at most 16 blocks, for each of four kinds of callers, and some."""
HOST_BYTES = 8 << 30
"""At most: to pin more takes longer than the measurement."""
WARM, WARM_SECONDS = 320, 10.0


@dataclass(frozen=True)
class _Found:
    """What came of adapters of some modules."""

    adapted: str
    many: str
    rate: float
    steady: Steady


@torch.inference_mode()
def measure(bench: Bench) -> Part:
    part = Part()
    layers = bench.pick(bench.layers, 1)
    with bench.serving_stream(), counted_compiles() as compiles:
        rate = _copy_rate(bench)
        model = llama(bench, layers)
        bench.say(f"C8 model of {layers} layers is there")
        for adapted in ADAPTED:
            _adapted(bench, part, model, compiles, adapted, rate)
            bench.clear()  # what one kind had in VRAM, before the next one's
    part.data |= {"layers": layers, "copied_a_second": rate, "kernels": compiles.count}
    part.notes += [
        f"C8: {layers} of {LLAMA_LAYERS} layers; a loader in memory instead of packages.",
        "C8: the reference worker's loop; “none” is the same loop without an engine. Prompts run in the same steps.",
        "C8: adapters of the attention's four linears are S-LoRA's, whose headline this is.",
    ]
    return part


def _adapted(bench: Bench, part: Part, model: nn.Module, compiles: Compiles, adapted: str, rate: float) -> None:
    """All of it for adapters of these modules. Nothing of it is referred to afterwards."""
    shapes = [Shape(RANKS[i % 4], named=ADAPTED[adapted]) for i in range(bench.pick(MANY, 40))]
    loader = MadeUpLoader(base_of(bench, bench.pick(bench.layers, 1)), shapes, bench.page_bytes)
    with closing(TimedModel(bench, model, KV_BLOCKS)) as flat:
        steady = _served(bench, part, model, flat, loader, compiles, adapted)
        found = _Found(adapted, f"{len(shapes)}", rate, steady)
        _figures(part, found)
        _bounds(part, found)


def _served(
    bench: Bench, part: Part, model: nn.Module, flat: TimedModel, loader: MadeUpLoader, compiles: Compiles, adapted: str
) -> Steady:
    """All kinds of callers beside each other, over an engine that serves the linears of these adapters."""
    many = len(loader.versions)
    rows, targets = buckets(bench.pick(ROWS, 1), 2 * ROWS), ADAPTED[adapted] or None
    host = min(loader.pages // 8, HOST_BYTES // bench.page_bytes)
    sizes = {"vram_pages": loader.pages // 4, "host_pages": host, "max_residents": many}
    with made_up_cache(bench, loader, **sizes) as cache, warm_engine(model, cache, rows, targets) as engine:
        bench.say(f"C8 {adapted}: cache and kernels are there, {compiles.count} compiled or loaded")
        refs = [v.pinned for v in loader.versions]
        warm = passed_through(  # the most wanted are in VRAM, the most wanted last
            cache, reversed(refs[: bench.pick(WARM, 10)]), at_once=AT_ONCE, seconds=WARM_SECONDS
        )
        bench.say(f"C8 {adapted}: {warm} adapters are there")
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
                callers.close()
        part.data[adapted] = {
            "adapters": many, "bytes_of_all": loader.pages * bench.page_bytes, "found": steady.told(),
            "statistics": repr(cache.statistics()), "graphs": repr(flat.runner.counts),
        }  # fmt: skip
    spreads = f"{steady.spread(f'{many}', f'{FEW}')}; {steady.spread(f'{many}', 'none')}"
    part.notes.append(f"C8, {adapted}, spread: {spreads}; void windows: {steady.voids()}.")
    return steady


def _figures(part: Part, found: _Found) -> None:
    steady, adapted, many = found.steady, found.adapted, found.many
    part.add("C8", f"{adapted}: tokens/s with {many} adapters over {FEW}", steady.ratio(many, f"{FEW}"), least=0.95)
    part.add("C8", f"{adapted}: tokens/s with {many} adapters over none", steady.ratio(many, "none"), least=0.85)
    part.add("C8", f"{adapted}: tokens/s with {FEW} adapters over none", steady.ratio(f"{FEW}", "none"))
    part.add("C8", f"{adapted}: tokens/s of base rows in steps over none", steady.ratio("base rows", "none"))
    for name, run in steady.runs.items():
        told = run.told()
        part.add("C8", f"{adapted}: tokens/s with {name}", run.speed, "tokens/s")
        part.add("C8", f"{adapted}: step with {name}, mean", told["mean_us"], "µs")
        if told["gpu_us_a_step"] is not None:
            part.add("C8", f"{adapted}: of it the forward on the GPU with {name}", told["gpu_us_a_step"], "µs")
            part.add("C8", f"{adapted}: between two forwards on the GPU with {name}", told["between_us_a_step"], "µs")


def _bounds(part: Part, found: _Found) -> None:
    """The ratios that would be left if the adapters of a step were read, and nothing else was to be done for them."""
    runs, adapted, many = found.steady.runs, found.adapted, found.many
    least = {"none": 1 / runs["none"].steps_per_second}
    for name in (f"{FEW}", many):
        count, nbytes = runs[name].adapters
        least[name] = least["none"] + nbytes / found.rate
        part.add("C8", f"{adapted}: adapters of a step with {name}", count, "adapters")
        part.add("C8", f"{adapted}: their bytes with {name}", nbytes / 1e6, "MB")
    part.add("C8", f"{adapted}: bound by bytes, {many} over {FEW}", least[f"{FEW}"] / least[many])
    part.add("C8", f"{adapted}: bound by bytes, {many} over none", least["none"] / least[many])
    part.add("C8", f"{adapted}: bound by bytes, {FEW} over none", least["none"] / least[f"{FEW}"])


def _copy_rate(bench: Bench) -> float:
    """Bytes a second that a copy reads and writes, the median of many."""
    source = torch.empty(bench.pick(1 << 30, 1 << 20), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    times = repeated(lambda: target.copy_(source), bench.pick(20, 3), bench.synchronize)
    return 2 * source.nbytes / sorted(times)[len(times) // 2]
