"""C6: more adapters than fit. The same requests (Zipf 1.0) with room for all adapters, a half and a tenth of them.

The model and the loop are C8's, with 4 layers at most and rank 16; every adapter is in the host slab. Three caches
with an engine, a model and a loop each run side by side, in turn.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from benchmarks.cache_adapters import MadeUpLoader, Shape
from benchmarks.cache_common import Bench, Part
from benchmarks.cache_model import TimedModel, base_of, buckets, llama, warm_engine
from benchmarks.cache_requests import ROWS, Callers, refs_of, zipf
from benchmarks.cache_steady import Compiles, Steady, counted_compiles
from benchmarks.cache_worlds import AT_ONCE, made_up_cache, passed_through

from adapterd.gpu_cache import AdapterCache

GOALS = {2: 0.8, 10: 0.5}
MOST_LAYERS = 4
RANK = 16
KV_BLOCKS = 1280
AGAIN = "all, again"
"""The same callers once more in each round, for the noise."""


@dataclass(frozen=True)
class World:
    """One cache with what runs over it."""

    cache: AdapterCache
    model: TimedModel
    callers: Callers


@torch.inference_mode()
def measure(bench: Bench) -> Part:
    part, count = Part(), bench.pick(640, 160)
    layers = bench.pick(min(bench.layers, MOST_LAYERS), 1)
    with bench.serving_stream(), counted_compiles() as compiles, ExitStack() as stack:
        worlds = {
            name: _world(bench, stack, layers, count, times)
            for name, times in (("all", 1), *((f"{times}×", times) for times in GOALS))
        }
        steady = _measured(bench, worlds, compiles)
        for name, world in worlds.items():
            part.data[name] = {
                **steady.told()[name], "statistics": repr(world.cache.statistics()),
                "graphs": repr(world.model.runner.counts),
            }  # fmt: skip
    part.data |= {"adapters": count, "rank": RANK, "layers": layers, "kernels": compiles.count}
    for times, least in GOALS.items():
        name = f"{times}×"
        part.add(
            "C6", f"{count} adapters, {name} what fits: tokens/s over all resident", steady.ratio(name, "all"),
            least=least,
        )  # fmt: skip
        part.add("C6", f"{name}: p99 of a step over all resident", steady.ratio(name, "all", "p99_us"), most=1.10)
        part.add("C6", f"{name}: p50 of a step over all resident", steady.ratio(name, "all", "p50_us"))
    part.add("C6", "all resident, again: tokens/s", steady.ratio(AGAIN, "all"))
    part.add("C6", "all resident, again: p99 of a step", steady.ratio(AGAIN, "all", "p99_us"))
    spreads = "; ".join(steady.spread(name, "all") for name in steady.runs if name != "all")
    part.notes += [
        "C6: 10 % is what we take for “unchanged”; see “all, again” for the noise.",
        f"C6, spread: {spreads}; void windows: {steady.voids()}.",
    ]
    return part


def _world(bench: Bench, stack: ExitStack, layers: int, count: int, times: int) -> World:
    """All adapters in the slab, the most wanted in VRAM."""
    model = llama(bench, layers)
    flat = TimedModel(bench, model, KV_BLOCKS)
    stack.callback(flat.close)
    loader = MadeUpLoader(base_of(bench, layers), [Shape(bench.pick(RANK, 4))] * count, bench.page_bytes)
    each = loader.versions[0].layout.n_pages
    sizes = {"vram_pages": count // times * each, "host_pages": count * each, "max_residents": count}
    cache = stack.enter_context(made_up_cache(bench, loader, **sizes))
    engine = stack.enter_context(warm_engine(model, cache, buckets(ROWS, 2 * ROWS)))
    refs = [v.pinned for v in loader.versions]
    passed_through(cache, reversed(refs), at_once=AT_ONCE)
    callers = Callers(bench, flat, engine, cache, refs_of(zipf(count, 3), refs))
    stack.callback(callers.close)
    bench.say(f"C6 {times}× the capacity is there")
    return World(cache, flat, callers)


def _measured(bench: Bench, worlds: dict[str, World], compiles: Compiles) -> Steady:
    kinds = {name: world.callers for name, world in worlds.items()}
    steady = Steady(bench, {**kinds, AGAIN: worlds["all"].callers}, compiles)
    steady.measure()
    return steady
