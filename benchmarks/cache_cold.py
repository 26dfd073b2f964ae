"""C2: cold loads. From a verified store in the page cache: verified, hashed, packed, copied, ready.

Signed and admitted adapters of 84 MB; arena and slab hold one each, so with three in turn every acquire is
cold. In the first form the tensors are hashed in, and packed from, the safetensors file; in the packed form the store
has kept the packed bytes under its own MACs (`store_key`), so that they are read and checked, and not hashed. Held
against the slowest of read, hash, pack and copy alone, and against safetensors' own `load_file` onto the device, which
verifies nothing.

A worker keeps in memory what it read of a version's structure (manifest, layout); so the loads of a worker that
never read the version, but finds it in its store, are told apart.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.cache_adapters import TENANT
from benchmarks.cache_cold_parts import PARTS, THREADS, WORKS, ColdParts
from benchmarks.cache_common import Bench, Part, summary
from benchmarks.cache_worlds import LOOK_SECONDS, Packages, folder_cache, loaded, until_ready

from adapterd.gpu_cache import AdapterCache

IN_TURN = 3
FORMS = (
    ("first form", None, "thread"),
    ("packed form", "packed.key", "thread"),
    ("first form", None, "process"),
    ("packed form", "packed.key", "process"),
)
ORIGINS = {"first form": "disk", "packed form": "packed"}


def measure(bench: Bench, packages: Packages) -> Part:
    part, refs = Part(), packages.refs[:IN_TURN]
    parts = ColdParts(bench, packages.folder(refs[0]), packages.base)
    alone = [parts.measure()]
    bench.say("C2 alone: " + ", ".join(f"{name} {alone[0][name]['p50_us'] / 1e3:.1f} ms" for name in WORKS))
    found: dict[str, Any] = {}
    sizes = {"vram_pages": packages.pages, "host_pages": packages.pages, "loader_threads": THREADS}
    for form, key, loader in FORMS:
        settings = {**sizes, "store_key": bench.folder / key if key else None, "loader": loader}
        name = form if loader == "thread" else f"{form}, loader process"
        with folder_cache(bench, packages, **settings) as cache:
            found[name] = _cold(bench, cache, refs)
        found[name]["never read"] = summary(_never_read(bench, packages, **settings))
        bench.say(f"C2 {name}: {found[name]}")
        strangers = {origin: n for origin, n in found[name]["loads"].items() if n and origin != ORIGINS[form]}
        if strangers:
            part.notes.append(f"C2: {name}: loads from elsewhere than {ORIGINS[form]} are among them: {strangers}.")
    alone.append(parts.measure())
    part.data |= {"alone": alone[0], "alone again": alone[1], **found}
    limits = {name: min(measured[name]["p50_us"] for measured in alone) for name in WORKS}
    slowest = max(PARTS, key=lambda name: limits[name])
    for form, cost in found.items():
        over, faster = cost["p50_us"] / limits[slowest], limits["unverified"] / cost["p50_us"]
        part.add("C2", f"cold, {form}: over the slowest part alone ({slowest})", over, most=1.5)
        part.add("C2", f"cold, {form}: times faster than unverified load_file", faster, "×", least=1.8)
        part.add("C2", f"cold, {form}: p50", cost["p50_us"] / 1e3, "ms")
        part.add("C2", f"cold, {form}: p99", cost["p99_us"] / 1e3, "ms")
        part.add("C2", f"cold, {form}: p50, of a worker that never read it", cost["never read"]["p50_us"] / 1e3, "ms")
    for name in WORKS:
        part.add("C2", f"{name} alone, the better of before and after", limits[name] / 1e3, "ms")
    return part


def _cold(bench: Bench, cache: AdapterCache, refs: Sequence[str]) -> dict[str, Any]:
    """Microseconds until ready, and by the cache's own count where the bytes came from and what took how long."""
    first, pinned = _first_acquires(bench, cache, refs)
    before = cache.statistics()
    found = [_one(bench, cache, pinned[index % IN_TURN]) for index in range(bench.pick(33, 6))]
    after = cache.statistics()
    stages = {
        stage: seconds - before.load_seconds.get("cold", {}).get(stage, 0.0)
        for stage, seconds in after.load_seconds.get("cold", {}).items()
    }
    loads = {str(origin): count - before.loads.get(origin, 0) for origin, count in after.loads.items()}
    return {**summary(found[IN_TURN:]), "very first": summary(first), "loads": loads, "seconds by stage": stages}


def _one(bench: Bench, cache: AdapterCache, ref: str) -> float:
    """Seconds until it is ready; then it is let go."""
    bench.synchronize()
    began = time.perf_counter()
    lease = cache.acquire(ref, tenant=TENANT)
    until_ready(cache, [lease], LOOK_SECONDS)
    seconds = time.perf_counter() - began
    lease.release()
    return seconds


def _never_read(bench: Bench, packages: Packages, **settings: Any) -> list[float]:
    """Seconds of first acquires in a new cache over the same store, the very first one left out."""
    found: list[float] = []
    for _ in range(bench.pick(3, 1)):
        with folder_cache(bench, packages, **settings) as cache:
            found += [_one(bench, cache, ref) for ref in packages.refs[:IN_TURN]][1:]
    return found


def _first_acquires(bench: Bench, cache: AdapterCache, refs: Sequence[str]) -> tuple[list[float], list[str]]:
    """Has all of them in the store, verified, and packed if it keeps packed forms: seconds, REFs by digest."""
    seconds, pinned = [], []
    for ref in refs:
        began = time.perf_counter()
        (lease,) = loaded(cache, [ref])
        seconds.append(time.perf_counter() - began)
        pinned.append(f"{ref}@sha256:{lease.composition[0][0].key.digest}")
        lease.release()
        time.sleep(bench.pick(10, 1) * 0.1)  # packed forms are written once the bytes are in use
    return seconds, pinned
