"""C1: from the host slab into pages of the arena, against one packed copy and against a copy a tensor.

The adapter has 84 MB, 80 pages of 1 MiB. It is copied in two ways: by the cache's copy queue alone, until its
events are done, and through the whole cache (a lease is acquired, until it is ready: books, pages, fences,
copies, events). It is looked for without a pause, as the peer's `synchronize` does; how long `Lease.wait` takes,
which sleeps between looks, is told beside it. Every copy, the peers', too, reads another part of host memory than
the last one, as adapters that come in turn do. Fresh pages are neighbours. Scattered ones have no neighbour: each
is a copy of its own. In the cache they come about by filling the arena with adapters of one page and keeping those
on odd pages.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import cycle, pairwise
from threading import Condition, Lock
from typing import Any

import torch
from benchmarks.cache_adapters import TENANT, MadeUpLoader, Shape, llama_base, own_bytes
from benchmarks.cache_common import GB, Bench, Part, median, repeated, summary
from benchmarks.cache_worlds import loaded, made_up_cache, passed_through, until_ready

from adapterd.gpu_cache import AdapterCache, Lease, open_device
from adapterd.gpu_cache.copies import CopyQueue, Transfer
from adapterd.gpu_cache.device import Device
from adapterd.gpu_cache.fences import OPEN
from adapterd.gpu_cache.pages import Allotment
from adapterd.gpu_cache.records import Entry
from adapterd.loader.identity import BasePin, VersionKey

QUEUED = 8
BIG, ONE_PAGE = Shape(16), Shape(1, linears=1)
KINDS = ("fresh", "scattered")
KEY = VersionKey(TENANT, BasePin("benchmarks/llama", "8" * 40, "0" * 64), "0" * 64)


def measure(bench: Bench) -> Part:
    part = Part()
    base = llama_base(bench.pick(32, 2), small=bench.small)
    loader = MadeUpLoader(base, [BIG] * (2 * QUEUED), bench.page_bytes)
    pages = loader.versions[0].layout.n_pages
    part.data["adapter"] = {"pages": pages, "own_bytes": own_bytes(loader.versions[0].manifest)}
    tensors = [2 * BIG.rank * w for m in base.modules for w in (m.in_features, m.out_features)]
    peers = part.data["peers"] = _Peers(bench, pages * bench.page_bytes, tensors).measure()
    bench.say(f"C1 peers: one copy {peers['one']['p50_us']:.0f} µs, queued {peers['rate_GBps']:.1f} GB/s")
    for kind in KINDS:
        found = _by_the_queue(bench, pages, kind)
        _compare(bench, part, peers, f"copy queue, {kind} pages", found)
    for kind in KINDS:
        found = _through_the_cache(bench, pages, kind)
        _compare(bench, part, peers, f"cache, {kind} pages", found)
    again = part.data["peers again"] = _Peers(bench, pages * bench.page_bytes, tensors).measure()
    part.add("C1", "pinned rate of this run", peers["rate_GBps"], "GB/s")
    part.add("C1", "the same at the end", again["rate_GBps"], "GB/s")
    return part


def _compare(bench: Bench, part: Part, peers: dict[str, Any], name: str, found: dict[str, Any]) -> None:
    part.data[name] = found
    bench.say(f"C1 {name}: ready {found['one']['p50_us']:.0f} µs, queued {found['rate_GBps']:.1f} GB/s")
    ready = found["one"]["p50_us"]
    part.add(
        "C1", f"{QUEUED} queued, {name}: over the pinned rate", found["rate_GBps"] / peers["rate_GBps"], least=0.95
    )
    part.add("C1", f"one, {name}: ready, over one packed copy", ready / peers["one"]["p50_us"], most=1.1)
    if "waited" in found:
        waited = found["waited"]["p50_us"] / peers["one"]["p50_us"]
        part.add("C1", f"one, {name}: Lease.wait, over one packed copy", waited)
    part.add("C1", f"one, {name}: a copy a tensor takes", peers["a copy a tensor"]["p50_us"] / ready, "× as long")


class _Peers:
    """One packed copy, and a copy a tensor into slots, as torch does them."""

    def __init__(self, bench: Bench, nbytes: int, tensors: list[int]) -> None:
        self._bench, self._nbytes, self._tensors = bench, nbytes, tensors
        self._hosts = bench.host(QUEUED * nbytes).split(nbytes)
        self._targets = torch.empty(QUEUED * nbytes, dtype=torch.uint8, device=bench.device).split(nbytes)
        self._turn = cycle(range(QUEUED))

    def measure(self) -> dict[str, Any]:
        rounds, settled = self._bench.pick(41, 3), self._bench.synchronize
        repeated(self._one, QUEUED, settled)
        queued = repeated(self._queued, self._bench.pick(15, 3), settled)
        return {
            "one": summary(repeated(self._one, rounds, settled)),
            "one again": summary(repeated(self._one, rounds, settled)),
            "a copy a tensor": summary(repeated(self._slots, rounds, settled)),
            "tensors": len(self._tensors),
            "queued": summary(queued),
            "rate_GBps": QUEUED * self._nbytes / median(queued) / GB,
        }

    def _one(self) -> None:
        index = next(self._turn)
        self._targets[index].copy_(self._hosts[index], non_blocking=True)

    def _queued(self) -> None:
        for _ in range(QUEUED):
            self._one()

    def _slots(self) -> None:
        index, at = next(self._turn), 0
        host, target = self._hosts[index], self._targets[index]
        for size in self._tensors:
            target[at : at + size].copy_(host[at : at + size], non_blocking=True)
            at += size


# The copy queue alone


class _Queue:
    """The cache's copy queue over a device of its own, with room for four times what is queued at once."""

    def __init__(self, bench: Bench, device: Device, pages: int, kind: str) -> None:
        self._bench, self._pages, self._kind, self._rng = bench, pages, kind, random.Random(2)
        self._total = 4 * QUEUED * pages
        self.arena = device.allocate_arena(self._total * bench.page_bytes)
        self.slab = device.allocate_host(QUEUED * pages * bench.page_bytes)
        self.slab.view(torch.int64).random_()
        self._lock = Condition(Lock())
        self._copies = CopyQueue(device, self.arena, bench.page_bytes, self._lock)
        self._copies.open()
        self.issuing: list[float] = []
        self._turn = cycle(range(QUEUED))

    def copied(self, count: int, *, checked: bool = False) -> float:
        """Seconds for that many adapters, to another place each time."""
        chosen, adapters = self.targets(count), [next(self._turn) for _ in range(count)]
        self._bench.synchronize()
        began = time.perf_counter()
        for index, targets in zip(adapters, chosen, strict=True):
            sources = tuple(range(index * self._pages, (index + 1) * self._pages))
            with self._lock:
                self._copies.add(Transfer(Entry(KEY), self.slab, sources, Allotment(targets, OPEN, ())))
        self._copies.issue(None)
        self.issuing.append(time.perf_counter() - began)
        landed = 0
        while landed < count:
            with self._lock:
                landed += len(self._copies.landed())
                if lost := self._copies.lost():
                    raise SystemExit(f"C1: {lost}")
        took = time.perf_counter() - began
        for index, targets in zip(adapters, chosen, strict=True) if checked else ():
            self._check(index, targets)
        return took

    def targets(self, count: int) -> list[tuple[int, ...]]:
        """Pages for that many adapters, no page twice."""
        size = self._pages
        if self._kind == "fresh":
            places = self._rng.sample(range(4 * QUEUED), count)
            return [tuple(range(place * size, (place + 1) * size)) for place in places]
        even = self._rng.sample(range(0, self._total, 2), count * size)
        return [tuple(even[i * size : (i + 1) * size]) for i in range(count)]

    def _check(self, index: int, targets: tuple[int, ...]) -> None:
        size = self._bench.page_bytes
        there = self.arena.view(-1, size)[list(targets)].cpu()
        here = self.slab.view(-1, size)[index * self._pages : (index + 1) * self._pages]
        if not torch.equal(there, here):
            raise SystemExit("C1: the copied bytes are wrong")


def _by_the_queue(bench: Bench, pages: int, kind: str) -> dict[str, Any]:
    device = open_device(bench.device)
    queue = _Queue(bench, device, pages, kind)
    one = [queue.copied(1) for _ in range(bench.pick(46, 5))]
    issue = summary(queue.issuing[3:])
    queued = [queue.copied(QUEUED) for _ in range(bench.pick(17, 5))]
    for count in (1, QUEUED):  # not among those that are timed: it leaves nothing of ours in the processor's caches
        queue.copied(count, checked=True)
    found = {
        "one": summary(one[3:]), "issue": issue, "queued": summary(queued[2:]), "copy_method": device.copy_method,
        "rate_GBps": QUEUED * pages * bench.page_bytes / median(queued[2:]) / GB,
    }  # fmt: skip
    device.close()
    return found


# Through the cache


def _through_the_cache(bench: Bench, pages: int, kind: str) -> dict[str, Any]:
    """Twice as many adapters as the arena has room for, in turn: every acquire evicts and copies."""
    needed, scattered = QUEUED * pages, kind == "scattered"
    shapes = [BIG] * (2 * QUEUED) + [ONE_PAGE] * (2 * needed if scattered else 0)
    loader = MadeUpLoader(llama_base(bench.pick(32, 2), small=bench.small), shapes, bench.page_bytes)
    arena = 2 * needed if scattered else needed
    sizes = {"vram_pages": arena, "host_pages": 2 * needed + 64, "max_residents": arena}
    refs = [v.pinned for v in loader.versions[: 2 * QUEUED]]
    with made_up_cache(bench, loader, **sizes) as cache:
        kept = _scatter(cache, [v.pinned for v in loader.versions[2 * QUEUED :]])
        passed_through(cache, refs)  # now all are in the slab
        one, acquires = _one_by_one(bench, cache, refs, lambda lease: until_ready(cache, [lease], None))
        waited, _ = _one_by_one(bench, cache, refs, Lease.wait)
        queued = _by_halves(bench, cache, refs)
        found = {
            "one": summary(one), "acquire": summary(acquires), "waited": summary(waited), "queued": summary(queued),
            "runs": _runs(cache, refs[0]),
            "rate_GBps": QUEUED * pages * bench.page_bytes / median(queued) / GB, "misses": cache.statistics().misses,
        }  # fmt: skip
        for lease in kept:
            lease.release()
    return found


def _one_by_one(
    bench: Bench, cache: AdapterCache, refs: list[str], wait: Callable[[Lease], object]
) -> tuple[list[float], list[float]]:
    """Seconds until `wait` has it ready, and of the acquire alone."""
    ready: list[float] = []
    acquires: list[float] = []
    for index in range(bench.pick(64, 20)):
        bench.synchronize()
        began = time.perf_counter()
        lease = cache.acquire(refs[index % len(refs)], tenant=TENANT)
        acquires.append(time.perf_counter() - began)
        wait(lease)
        ready.append(time.perf_counter() - began)
        lease.release()
    return ready[len(refs) :], acquires[len(refs) :]


def _by_halves(bench: Bench, cache: AdapterCache, refs: list[str]) -> list[float]:
    found: list[float] = []
    for index in range(bench.pick(22, 4)):
        bench.synchronize()
        began = time.perf_counter()
        leases = [cache.acquire(ref, tenant=TENANT) for ref in (refs[:QUEUED] if index % 2 else refs[QUEUED:])]
        until_ready(cache, leases, None)
        found.append(time.perf_counter() - began)
        for lease in leases:
            lease.release()
    return found[2:]


def _scatter(cache: AdapterCache, small: list[str]) -> list[Lease]:
    """Leaves only even pages to the adapters that follow; the leases that keep the odd ones."""
    leases = loaded(cache, small)
    random.Random(1).shuffle(leases)
    kept = []
    for lease in leases:
        if lease.composition[0][0].pages[0] % 2:
            kept.append(lease)
        else:
            lease.release()
    return kept


def _runs(cache: AdapterCache, ref: str) -> int:
    """How many runs of neighbours the pages of `ref` are."""
    (lease,) = loaded(cache, [ref])
    pages = lease.composition[0][0].pages
    lease.release()
    return 1 + sum(b != a + 1 for a, b in pairwise(pages))
