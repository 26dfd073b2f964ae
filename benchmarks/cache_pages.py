"""C5: VRAM over the adapters' own bytes, and a million random allocations and frees of pages."""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.cache_adapters import TENANT, MadeUpLoader, Shape, layout_of, llama_base, modules_of, own_bytes
from benchmarks.cache_common import MIB, Bench, Part
from benchmarks.cache_worlds import loaded, made_up_cache

from adapterd.gpu_cache.fences import OPEN
from adapterd.gpu_cache.pages import PagePool
from adapterd.loader.base_model import BaseSpec

RANKS = (8, 16, 32, 64, 128)
SMALL_BYTES = 16 * MIB


def measure(bench: Bench) -> Part:
    part = Part()
    base = llama_base()
    large = part.data["by rank"] = {rank: _overhead(base, Shape(rank)) for rank in RANKS}
    small = part.data["small ones"] = [
        {"rank": rank, "linears": linears, "bytes": size, "ratio": ratio}
        for rank in (1, 2, 4, 8, 16, 32, 64)
        for linears in (7, 14, 28, 56, 112, 224)
        for size, ratio in [_overhead(base, Shape(rank, linears))]
        if MIB <= size < SMALL_BYTES
    ]
    mixed = sum(size * ratio for size, ratio in large.values()) / sum(size for size, _ in large.values())
    part.add("C5", "VRAM over own bytes, ranks 8 to 128 mixed", mixed, most=1.05)
    part.add("C5", "the same, the worst of these ranks", max(ratio for _, ratio in large.values()), most=1.05)
    together = sum(s["bytes"] * s["ratio"] for s in small) / sum(s["bytes"] for s in small)
    part.add("C5", f"{len(small)} kinds of adapters of 1 to 16 MiB together", together, most=1.15)
    part.add("C5", "the worst of them", max(s["ratio"] for s in small))
    part.data["in a cache"] = _in_a_cache(bench)
    part.add("C5", "VRAM in use by a cache's own count, over own bytes", part.data["in a cache"]["ratio"], most=1.05)
    operations = bench.pick(10**6, 10**4)
    pool = part.data["pool"] = _random_operations(operations)
    bench.say(f"C5 {pool}")
    part.add(
        "C5", f"failed allocations in {operations} random ones, enough pages free", pool["failed"], "times", most=0
    )
    return part


def _overhead(base: BaseSpec, shape: Shape) -> tuple[int, float]:
    """(own bytes, page bytes over them) with pages of 1 MiB."""
    own = sum(2 * m.rank * (m.in_features + m.out_features) for m in modules_of(base, shape))
    return own, layout_of(base, shape, MIB).nbytes / own


def _in_a_cache(bench: Bench) -> dict[str, Any]:
    """Adapters of mixed ranks in VRAM, as many as the arena has room for by their own bytes and 5 %."""
    base = llama_base(bench.pick(32, 8), small=bench.small)
    loader = MadeUpLoader(base, [Shape(rank) for rank in (RANKS if bench.cuda else RANKS[:2])], bench.page_bytes)
    own = sum(own_bytes(v.manifest) for v in loader.versions)
    with made_up_cache(bench, loader, vram_pages=loader.pages, host_pages=loader.pages) as cache:
        leases = loaded(cache, [v.pinned for v in loader.versions])
        used = cache.statistics().vram_bytes[TENANT]
        for lease in leases:
            lease.release()
    return {"own_bytes": own, "vram_bytes": used, "ratio": used / own}


def _random_operations(count: int) -> dict[str, Any]:
    """Adapters of 1 to 672 pages come and go (rank 8 to 128, and small ones); mostly the pool is nearly full."""
    rng, pool = random.Random(5), PagePool(24_001)
    held: list[tuple[int, ...]] = []
    failed = refused = 0
    began = time.perf_counter()
    for _ in range(count):
        wanted = rng.choice((1, 2, 3, 5, 7, 40, 80, 81)) if rng.random() < 0.97 else rng.choice((160, 320, 672))
        if pool.free < wanted or (held and rng.random() < 0.45):
            refused += pool.free < wanted and pool.take(wanted, TENANT) is None
            if held:
                index = rng.randrange(len(held))
                held[index], held[-1] = held[-1], held[index]
                pool.give_back(held.pop(), OPEN)
            continue
        allotment = pool.take(wanted, TENANT)
        if allotment is None or len(set(allotment.pages)) != wanted:
            failed += 1
        else:
            held.append(allotment.pages)
    return {
        "operations": count, "failed": failed, "refused": refused, "held": len(held), "free": pool.free,
        "µs each": 1e6 * (time.perf_counter() - began) / count,
    }  # fmt: skip
