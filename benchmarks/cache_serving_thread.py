"""C4: what the cache costs the serving thread in processor time: a step's fences, an event, an acquire and release."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.cache_adapters import TENANT, MadeUpLoader, Shape, llama_base
from benchmarks.cache_common import Bench, Part, summary
from benchmarks.cache_worlds import loaded, made_up_cache, until_ready

from adapterd.gpu_cache import AdapterCache, Lease
from adapterd.gpu_cache.device import Device
from adapterd.gpu_cache.fences import Readers

LEASES = 64
EVERY = 200
"""Iterations between two waits for the device, so that its queue stays short; the waits are not timed."""


def measure(bench: Bench) -> Part:
    part = Part()
    loader = MadeUpLoader(llama_base(1, small=bench.small), [Shape(8)] * LEASES, bench.page_bytes)
    with bench.serving_stream(), made_up_cache(
        bench, loader, vram_pages=loader.pages, host_pages=loader.pages, max_residents=LEASES
    ) as cache:  # fmt: skip
        part.data = _costs(bench, cache, loader)
    costs = part.data
    empty = costs["nothing"]["p50_us"]
    fences, whole = costs["fences"], costs[f"step of {LEASES} leases"]
    part.add("C4", "fences of a step: its event, recorded: p50", fences["p50_us"] - empty, "µs", most=3.0)
    part.add("C4", f"the same, noted by {LEASES} adapters: p50", costs["noted"]["p50_us"] - empty, "µs")
    part.add("C4", f"begin_step + end_step with all checks, {LEASES} leases: p50", whole["p50_us"] - empty, "µs")
    part.add("C4", f"begin_step + end_step with all checks, {LEASES} leases: p99", whole["p99_us"] - empty, "µs")
    part.add("C4", "begin_step + end_step, one lease: p50", costs["step of one lease"]["p50_us"] - empty, "µs")
    part.add("C4", "begin_step + end_step, base rows only: p50", costs["step of the base"]["p50_us"] - empty, "µs")
    for how in ("digest", "route", "alias"):
        cost, most = costs[f"acquire and release by {how}"], None if how == "alias" else 10.0
        what = f"acquire + release of a resident adapter by {how}"
        part.add("C4", f"{what}: p50", cost["p50_us"] - empty, "µs", most=most)
        part.add("C4", f"{what}: p99", cost["p99_us"] - empty, "µs")
    part.notes.append(
        "C4: by alias, the time between acquire and ready is another thread's and is not counted; "
        f"it was {costs['ready by alias']['p50_us']:.0f} µs."
    )
    return part


def _costs(bench: Bench, cache: AdapterCache, loader: MadeUpLoader) -> dict[str, Any]:
    leases = loaded(cache, [v.pinned for v in loader.versions])
    times, device = bench.pick(4000, 50), cache.device

    def step(mine: list[Any]) -> Callable[[], None]:
        return lambda: cache.begin_step(mine).end()

    readers = [Readers() for _ in leases]
    found = {
        "nothing": _timed(bench, lambda: None, times),
        f"step of {LEASES} leases": _timed(bench, step(leases), times),
        "step of one lease": _timed(bench, step(leases[:1]), times),
        "step of the base": _timed(bench, step([None]), times),
        "fences": _timed(bench, lambda: device.record(device.compute), times),
        "noted": _timed(bench, lambda: _noted(device, readers), times),
        f"step of {LEASES} leases, again": _timed(bench, step(leases), times),
    }
    pinned, alias = loader.versions[0].pinned, loader.versions[0].alias
    found["acquire and release by digest"], _ = _acquires(bench, cache, pinned, times)
    with cache.route(alias, tenant=TENANT) as route:
        while not route.acquire().ready:
            cache.pump()
        found["acquire and release by route"], _ = _acquires(bench, cache, pinned, times, route.acquire)
    found["acquire and release by alias"], found["ready by alias"] = _acquires(bench, cache, alias, times)
    for lease in leases:
        lease.release()
    bench.say("C4 " + ", ".join(f"{name} {cost['p50_us']:.2f} µs" for name, cost in found.items()))
    return found


def _noted(device: Device, readers: list[Readers]) -> None:
    stream = device.compute
    event = device.record(stream)
    for each in readers:
        each.note(stream, event)


def _timed(bench: Bench, work: Callable[[], object], times: int) -> dict[str, float]:
    found = []
    for index in range(times + times // 10):
        if index % EVERY == 0:
            bench.synchronize()
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return summary(found[times // 10 :])


def _acquires(
    bench: Bench, cache: AdapterCache, ref: str, times: int, acquire: Callable[[], Lease] | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Of acquire and release, and of the time until ready between them."""
    busy, ready = [], []
    for index in range(times):
        if index % EVERY == 0:
            bench.synchronize()
        began = time.perf_counter()
        lease = cache.acquire(ref, tenant=TENANT) if acquire is None else acquire()
        middle = time.perf_counter()
        until_ready(cache, [lease])
        then = time.perf_counter()
        lease.release()
        busy.append(time.perf_counter() - then + middle - began)
        ready.append(then - middle)
    return summary(busy), summary(ready)
