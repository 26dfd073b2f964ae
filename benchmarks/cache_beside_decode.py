"""C3: decode beside continuous load, verify, stage and evict, with the loader in threads and in its own process.

A step is a captured graph of 64 products. The serving thread begins and ends a step of the cache around each
launch and waits for the tokens, as an engine does. Meanwhile it keeps two leases on their way, over more signed
adapters of 84 MB than fit into VRAM or into the slab: each comes off the disk's page cache, is hashed, packed,
copied, read by one step, let go, and evicted. Alone is the same loop with nothing to load, before and after.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from benchmarks.cache_adapters import TENANT
from benchmarks.cache_common import GB, Bench, DecodeStep, Part, summary
from benchmarks.cache_worlds import Packages, folder_cache, passed_through

from adapterd.gpu_cache import AdapterCache, Lease
from adapterd.loader.errors import AdapterdError

LOADERS = ("thread", "process")
ON_THEIR_WAY = 2
WARM_STEPS = 200


def measure(bench: Bench, packages: Packages) -> Part:
    part, pages = Part(), packages.pages
    with bench.serving_stream():
        decode = DecodeStep(bench)
        for loader in LOADERS:
            sizes = {"vram_pages": 3 * pages, "host_pages": 3 * pages, "loader_threads": ON_THEIR_WAY}
            try:
                with folder_cache(bench, packages, loader=loader, **sizes) as cache:
                    found = _compare(bench, cache, decode, packages.refs, pages)
            except AdapterdError as failure:
                part.notes.append(f'C3: loader="{loader}" could not be measured: {failure}')
                bench.say(part.notes[-1])
                continue
            part.data[loader] = found
            alone, beside = found["alone"], found["beside"]
            name = f'decode beside loading, loader="{loader}"'
            part.add("C3", f"{name}: wall p50 over alone", beside["p50_us"] / alone["p50_us"], most=1.05)
            part.add("C3", f"{name}: wall p99 over alone", beside["p99_us"] / alone["p99_us"], most=1.10)
            part.add("C3", f"{name}: staged meanwhile", beside["staged_GBps"], "GB/s")
            again = found["alone again"]
            part.add("C3", f'alone again, loader="{loader}": wall p50', again["p50_us"] / alone["p50_us"])
            part.add("C3", f'alone again, loader="{loader}": wall p99', again["p99_us"] / alone["p99_us"])
    return part


def _compare(bench: Bench, cache: AdapterCache, decode: DecodeStep, refs: Sequence[str], pages: int) -> dict[str, Any]:
    passed_through(cache, refs)  # the loader has started, and the store has all of them
    _Loop(cache, decode, iter(())).run(WARM_STEPS)
    steps = bench.pick(3000, 1000)
    found = {}
    for name, wanted in (("alone", iter(())), ("beside", cycle(refs)), ("alone again", iter(()))):
        loop = _Loop(cache, decode, wanted)
        if name == "beside":
            loop.run(WARM_STEPS if bench.cuda else 1)
        walls, staged, took = loop.run(steps)
        loop.stop()
        nbytes = staged * pages * bench.page_bytes
        found[name] = {**summary(walls), "adapters": staged, "seconds": took, "staged_GBps": nbytes / took / GB}
        bench.say(f"C3 {cache.config.loader}, {name}: {found[name]}")
    return found


class _Loop:
    """The serving thread."""

    def __init__(self, cache: AdapterCache, decode: DecodeStep, wanted: Iterator[str]) -> None:
        self._cache, self._decode, self._wanted = cache, decode, wanted
        self._coming: deque[Lease] = deque()

    def run(self, steps: int) -> tuple[list[float], int, float]:
        """(seconds of each step, adapters that became ready, seconds in all)."""
        walls, staged, start = [], 0, time.perf_counter()
        for _ in range(steps):
            began = time.perf_counter()
            ready = self._ready()
            ticket = self._cache.begin_step(ready or [None])
            self._decode.launch()
            ticket.end()
            self._ask()
            self._decode.wait()
            for lease in ready:
                lease.release()
            staged += len(ready)
            walls.append(time.perf_counter() - began)
        return walls, staged, time.perf_counter() - start

    def stop(self) -> None:
        """Lets go of everything, and gives what was under way time to end."""
        while self._coming:
            self._coming.popleft().release()
        time.sleep(0.5)
        self._cache.pump()

    def _ready(self) -> list[Lease]:
        found = []
        for lease in [lease for lease in self._coming if lease.ready or lease.failed]:
            if lease.failed:
                raise SystemExit(f"C3: {lease.problem}")
            self._coming.remove(lease)
            found.append(lease)
        return found

    def _ask(self) -> None:
        """After the launch: what the serving thread does now is hidden behind the GPU's work."""
        while len(self._coming) < ON_THEIR_WAY and (ref := next(self._wanted, None)) is not None:
            self._coming.append(self._cache.acquire(ref, tenant=TENANT))
