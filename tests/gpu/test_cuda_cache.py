"""The contract suites of pages and cache, on CUDA; and fences under load."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from adapterd.gpu_cache import AdapterCache, CacheConfig, Lease
from adapterd.gpu_cache.cuda_device import CudaDevice
from adapterd.gpu_cache.device import Device
from contracts.cache import CacheContract
from contracts.pages import PagePoolMachine
from fakes.adapters import MemoryLoader, tag
from fakes.cache_world import host_over
from fakes.delayed_cuda import DelayedCuda

TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class TestCudaCache(CacheContract):
    def make(self) -> Device:
        return CudaDevice()


class TestDelayedCache(CacheContract):
    def make(self) -> Device:
        return DelayedCuda(seed=1)


WORDS = 256 // 8


def read(cache: AdapterCache, lease: Lease, cycles: int) -> list[tuple[torch.Tensor, int]]:
    """A step that reads all of the lease's pages, late: (what it will have read, the word that must fill it)."""
    words = cache.arena.view(torch.int64).view(-1, WORDS)
    with cache.begin_step([lease]):
        torch.cuda._sleep(cycles)
        ((resident, _),) = lease.composition
        return [(words[p].clone(), tag(resident.key.digest, i)) for i, p in enumerate(resident.pages)]


def ready(cache: AdapterCache, name: str) -> Lease:
    """Steps of base rows until the adapter is there; its copies are issued behind whatever still runs."""
    lease = cache.acquire(f"acme/{name}", tenant="acme")
    while not lease.ready:
        with cache.begin_step([None]):
            pass
        cache.pump()
    return lease


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_pages_are_not_overwritten_while_a_slow_step_reads_them(seed: int | None) -> None:
    """The step's kernels start late; meanwhile its lease is gone and its pages are given to the next adapter.

    With a seed the copies start late too. Every other two adapters are evicted unread.
    """
    device = CudaDevice() if seed is None else DelayedCuda(seed=seed)
    loader = MemoryLoader()
    for index, name in enumerate("abcdef"):
        loader.publish(f"acme/{name}", 2 + index % 3)
    config = CacheConfig(device="cuda:0", vram_bytes=4 * 256, host_bytes=24 * 256, page_bytes=256)
    seen: list[tuple[torch.Tensor, int]] = []
    host = host_over(loader, config, device)
    with AdapterCache(config, base=loader.base, host=host, device=device) as cache:
        for name in "abcdef":  # warm: from here on every load is a host hit
            cache.acquire(f"acme/{name}", tenant="acme").wait(20).release()
        try:
            torch.cuda.set_sync_debug_mode("error")
            for turn, name in enumerate("abcdef" * 5):
                lease = ready(cache, name)
                if turn // 2 % 2:
                    seen += read(cache, lease, int(2e7))
                lease.release()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        alive = device.events_alive
        for name in "abcdef":
            read(cache, lease := ready(cache, name), 1000)
            lease.release()
        assert device.events_alive <= alive + 4, "marks are used again"
    device.close()
    assert len(seen) > 30
    assert all(bool((found == expected).all()) for found, expected in seen)
