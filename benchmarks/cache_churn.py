"""C7: 10,000 loads and evictions; then VRAM, host memory, file descriptors, threads and events are as before."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import torch
from benchmarks.cache_adapters import MadeUpLoader, Shape, llama_base
from benchmarks.cache_common import MIB, Bench, Part
from benchmarks.cache_worlds import TENANT, made_up_cache, until_ready

from adapterd.gpu_cache import AdapterCache

ADAPTERS = 24
RESIDENT = 6
IN_SLAB = 12


def measure(bench: Bench) -> Part:
    """Every other load finds its bytes in the slab, the rest go through the loader."""
    part = Part()
    loader = MadeUpLoader(llama_base(1, small=bench.small), [Shape(8)] * ADAPTERS, bench.page_bytes)
    each = loader.versions[0].layout.n_pages
    cycles = bench.pick(10_000, 200)
    with bench.serving_stream(), made_up_cache(
        bench, loader, vram_pages=RESIDENT * each, host_pages=IN_SLAB * each, loader_threads=2
    ) as cache:  # fmt: skip
        _cycles(bench, cache, loader, bench.pick(1000, 50))
        before = _counts(bench, cache)
        began = time.perf_counter()
        _cycles(bench, cache, loader, cycles)
        took = time.perf_counter() - began
        after = _counts(bench, cache)
        statistics = cache.statistics()
    part.data = {"cycles": cycles, "seconds": took, "before": before, "after": after, "statistics": repr(statistics)}
    bench.say(f"C7 {cycles} cycles in {took:.1f} s: {before} -> {after}")
    for name, unit, most in (("vram_used", "MiB", 0), ("rss", "MiB", 16), ("files", "", 0), ("threads", "", 0)):
        grown = after[name] - before[name]
        part.add("C7", f"{name} after {cycles} cycles, over before", grown / (MIB if unit else 1), unit, most=most)
    part.add("C7", "events alive, over before", after["events"] - before["events"], "", most=4)
    part.add("C7", "leases leaked", statistics.leaked_leases, "", most=0)
    part.add("C7", "one cycle: acquire, ready, step, release", 1e6 * took / cycles, "µs")
    part.notes.append(
        "C7: resident memory may move by 16 MiB, the allocator's; events by 4: the pool has as many as "
        "were ever in use at a time. All else must be equal."
    )
    return part


def _cycles(bench: Bench, cache: AdapterCache, loader: MadeUpLoader, count: int) -> None:
    """Two passes of neighbours in turn: the second pass finds half of them in the slab."""
    order = [i for start in range(0, ADAPTERS, IN_SLAB) for i in [*range(start, start + IN_SLAB)] * 2]
    for index in range(count):
        lease = cache.acquire(loader.versions[order[index % len(order)]].pinned, tenant=TENANT)
        until_ready(cache, [lease])
        cache.begin_step([lease]).end()
        lease.release()
    bench.synchronize()
    cache.pump()


def _counts(bench: Bench, cache: AdapterCache) -> dict[str, int]:
    gc.collect()
    bench.synchronize()
    cache.begin_step([None]).end()
    bench.synchronize()
    cache.pump()
    free, total = torch.cuda.mem_get_info(bench.device) if bench.cuda else (0, 0)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "vram_used": total - free,
        "rss": resident_pages * os.sysconf("SC_PAGESIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "events": cache.device.events_alive,
    }
