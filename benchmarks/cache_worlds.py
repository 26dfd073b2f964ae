"""Caches for the benchmarks, over versions made up in memory or over signed and admitted packages in a folder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cache_adapters import LLAMA_8B, TENANT, MadeUpLoader, Shape, layout_of, llama_base
from benchmarks.cache_common import Bench

from adapterd.gpu_cache import AdapterCache, CacheConfig, Lease, open_device
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.sources import FolderSource
from adapterd.loader.trust.policy import TrustStore

PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 50e-6
AT_ONCE = 16
"""Loads beside each other: a tenant's queue is bounded."""


def settings(bench: Bench, *, vram_pages: int, host_pages: int, **more: Any) -> CacheConfig:
    return CacheConfig(
        device=bench.device,
        page_bytes=bench.page_bytes,
        vram_bytes=vram_pages * bench.page_bytes,
        host_bytes=host_pages * bench.page_bytes,
        **more,
    )


@contextmanager
def made_up_cache(bench: Bench, loader: MadeUpLoader, **sizes: Any) -> Iterator[AdapterCache]:
    """An open cache over `loader`, which works in threads of this process; `sizes` as of `settings`."""
    from fakes.cache_world import host_over

    config, device = settings(bench, **sizes), open_device(bench.device)
    try:
        host = host_over(loader, config, device)
        with AdapterCache(config, base=loader.base, host=host, device=device) as cache:
            yield cache
    finally:
        bench.synchronize()
        device.close()


@dataclass(frozen=True)
class Packages:
    """Signed and admitted packages in a folder.

    Attributes:
        root: the folder, as `FolderSource` has it.
        trust: the trust file that a worker needs for them.
        refs: with the alias.
        pages: of each, packed.
    """

    base: BaseSpec
    root: Path
    trust: Path
    refs: tuple[str, ...]
    pages: int

    def folder(self, ref: str) -> Path:
        return self.root / ref / "1"


def published(bench: Bench, count: int) -> Packages:
    """`count` packages of random values, all seven linears, rank 16, BF16: 84 MB each for Llama-3.1-8B's shapes."""
    from fakes.publisher import FolderPublisher

    base = llama_base(bench.pick(32, 1), small=bench.small)
    publisher = FolderPublisher(bench.folder / "published", base)
    names = [f"big{i}" for i in range(count)]
    targets = sorted({linear.rpartition(".")[2] for linear in LLAMA_8B})

    def publish(name: str) -> None:
        publisher.publish(TENANT, name, rank=16, alpha=16, modules=targets, dtype="BF16", seed=int(name[3:]))

    publish(names[0])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(publish, names[1:]))
    trust = bench.folder / "trust.json"
    publisher.trust.save(trust)
    refs = tuple(f"{TENANT}/{name}" for name in names)
    pages = layout_of(base, Shape(16), bench.page_bytes).n_pages
    return Packages(base, publisher.root, trust, refs, pages)


@contextmanager
def folder_cache(bench: Bench, packages: Packages, **sizes: Any) -> Iterator[AdapterCache]:
    """An open cache over published packages, with its verified store in the scratch folder."""
    config = settings(bench, store=bench.folder / "store", **sizes)
    source, trust = FolderSource(packages.root), TrustStore.load(packages.trust)
    with AdapterCache(config, base=packages.base, source=source, trust=trust) as cache:
        yield cache


def until_ready(cache: AdapterCache, leases: Sequence[Lease], every: float | None = 0.0) -> None:
    """Looks every so many seconds; 0: as often as a thread can that lets the others run, which takes 50 µs.

    None: all the time. While loader threads of this process work, that would take the interpreter from them.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        cache.pump()
        if all(lease.ready for lease in leases):
            return
        if every is not None:
            time.sleep(every)
        for lease in leases:
            if lease.failed:
                raise SystemExit(f"{lease!r}: {lease.problem}")
        if time.monotonic() > deadline:
            raise SystemExit(f"not ready after {PATIENCE_SECONDS} s: {leases!r}; {cache.statistics()}")


def loaded(cache: AdapterCache, refs: Iterable[str]) -> list[Lease]:
    """Ready leases on all of them."""
    leases: list[Lease] = []
    for some in _batches(list(refs), AT_ONCE):
        asked = [cache.acquire(ref, tenant=TENANT) for ref in some]
        until_ready(cache, asked, LOOK_SECONDS)
        leases += asked
    return leases


def _batches(refs: list[str], size: int) -> Iterator[list[str]]:
    for begin in range(0, len(refs), size):
        yield refs[begin : begin + size]


def passed_through(cache: AdapterCache, refs: Iterable[str], *, at_once: int = 1, seconds: float = float("inf")) -> int:
    """Each once in VRAM and let go, so that it is in the host slab if there is room.

    Args:
        at_once: loads beside each other; VRAM must have room for them.
        seconds: no more begin after so many.

    Returns:
        How many they were.
    """
    began, done = time.monotonic(), 0
    for some in _batches(list(refs), at_once):
        for lease in loaded(cache, some):
            lease.release()
        done += len(some)
        if time.monotonic() - began > seconds:
            break
    return done
