"""C6: more adapters than fit. The same requests (Zipf 1.0) with room for all adapters, a half and a tenth of them.

The model and the loop are C8's, with 4 layers at most and rank 16; every adapter is in the host slab. Three caches
with an engine, a model and a loop each run side by side, in turn.

**Warm rows' p99.** A row that decodes is warm: its adapter is in VRAM, and the cache lets nobody take it away. What it
waits is the time from one of its tokens to the next one, so that is measured, of every token but a request's first. (A
request whose adapter is not there waits for its first token only.) Each row has a token in each step, so this is nearly
the time of a step, which is told, too, with its steps of tokens alone and those with prompts apart: they take different
times on the device, and have to come in the same shares for the p99 to be comparable.

The serving thread does for an adapter that comes what it need not do for one that is there: it finds the room, enqueues
the copies, notices their end and fills a row of the kernels' tables. A warm row feels nothing of that as long as all
that the host does in a step takes less time than the device needs for it.
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
WINDOW_SECONDS = 1.6
"""About 750 steps: the p99 of fewer is one of a handful."""
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
        part.add(
            "C6", f"{name}: warm rows, p99 from token to token over all resident",
            steady.ratio(name, "all", "token_p99_us"), most=1.10,
        )  # fmt: skip
        part.add("C6", f"{name}: p99 of a step over all resident", steady.ratio(name, "all", "p99_us"))
        part.add("C6", f"{name}: p50 of a step over all resident", steady.ratio(name, "all", "p50_us"))
    part.add("C6", "all resident, again: tokens/s", steady.ratio(AGAIN, "all"))
    part.add(
        "C6", "all resident, again: warm rows, p99 from token to token", steady.ratio(AGAIN, "all", "token_p99_us")
    )
    part.add("C6", "all resident, again: p99 of a step", steady.ratio(AGAIN, "all", "p99_us"))
    spreads = "; ".join(steady.spread(name, "all") for name in steady.runs if name != "all")
    part.notes += [
        "C6: 10 % is what we take for “unchanged”; see “all, again” for the noise.",
        "C6: a warm row has a token in each step. Steps with prompts and without are told apart in the file.",
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
    steady = Steady(bench, {**kinds, AGAIN: worlds["all"].callers}, compiles, WINDOW_SECONDS)
    steady.measure()
    return steady
