"""The cache with real loader threads and real copy streams, each stopped where the test wants it (I14)."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator

import pytest

from adapterd.gpu_cache import AdapterCache, CacheConfig, LeaseState
from adapterd.gpu_cache.cpu_device import CpuDevice
from adapterd.gpu_cache.host.interface import Progress, Stage
from adapterd.loader.errors import AdapterdError, Code, Unavailable
from fakes.adapters import PAGE_BYTES, MemoryLoader, wrong_pages
from fakes.cache_world import host_over
from fakes.devices import Barrier, HeldDevice


@pytest.fixture
def loader() -> MemoryLoader:
    loader = MemoryLoader()
    for name in ("acme/a", "acme/b", "blue/c"):
        loader.publish(name, 2)
    return loader


@pytest.fixture
def device() -> HeldDevice:
    return HeldDevice()


@pytest.fixture
def cache(loader: MemoryLoader, device: HeldDevice) -> Iterator[AdapterCache]:
    before = set(threading.enumerate())
    config = CacheConfig(vram_bytes=8 * PAGE_BYTES, host_bytes=8 * PAGE_BYTES, page_bytes=PAGE_BYTES)
    with AdapterCache(config, base=loader.base, host=host_over(loader, config, device), device=device) as cache:
        yield cache
    device.close()
    assert set(threading.enumerate()) <= before, "threads are left over"


def run_a_step(cache: AdapterCache) -> None:
    with cache.begin_step([None, cache.acquire(None, tenant="acme")]):
        pass


def test_a_lease_says_how_far_its_load_is(cache: AdapterCache, loader: MemoryLoader) -> None:
    verifying, packing = Barrier(), Barrier()
    loader.barriers = {"prepare acme/a": verifying, "fill acme/a": packing}
    lease = cache.acquire([("acme/a", 1.0), ("acme/b", 1.0)], tenant="acme")
    verifying.await_arrival()
    until_loading(cache, 1)  # acme/b is verified
    assert lease.progress == Progress(Stage.VERIFY, PAGE_BYTES, 2 * PAGE_BYTES)
    assert set(cache.loading()) <= {component.key for component in lease.record.components or ()}
    verifying.open()
    packing.await_arrival()
    until_loading(cache, 1)
    assert lease.progress == Progress(Stage.PACK, 0, 2 * PAGE_BYTES)
    packing.open()
    assert lease.wait(20).progress is None
    assert cache.acquire(None, tenant="acme").progress is None


def test_loads_of_several_versions_are_summed(cache: AdapterCache, loader: MemoryLoader) -> None:
    one, other = Barrier(), Barrier()
    loader.barriers = {"prepare acme/a": one, "prepare acme/b": other}
    lease = cache.acquire([("acme/a", 1.0), ("acme/b", 1.0)], tenant="acme")
    one.await_arrival()
    other.await_arrival()
    assert lease.progress == Progress(Stage.VERIFY, 2 * PAGE_BYTES, 4 * PAGE_BYTES)
    lease.release()
    assert lease.progress is None
    one.open()
    other.open()


def until_loading(cache: AdapterCache, loads: int) -> None:
    while len(cache.loading()) != loads:
        os.sched_yield()


@pytest.mark.parametrize("where", ["resolve", "prepare", "fill"])
def test_acquire_does_not_wait_for_the_loader(cache: AdapterCache, loader: MemoryLoader, where: str) -> None:
    barrier = loader.barriers[f"{where} acme/a"] = Barrier()
    lease = cache.acquire("acme/a", tenant="acme")
    barrier.await_arrival()
    assert not lease.ready
    run_a_step(cache)
    assert cache.acquire("blue/c", tenant="blue").wait(20).ready
    with pytest.raises(Unavailable) as timeout:
        lease.wait(0)
    assert timeout.value.code is Code.LEASE_TIMEOUT
    assert not lease.failed
    barrier.open()
    assert lease.wait(20).ready


def test_acquire_does_not_wait_for_the_device(cache: AdapterCache, device: HeldDevice) -> None:
    device.hold()
    lease = cache.acquire("acme/a", tenant="acme")
    while not device.copies_queued:
        cache.pump()
    assert lease.record.state is LeaseState.COPYING
    run_a_step(cache)
    with pytest.raises(AdapterdError) as early:
        cache.begin_step([lease])
    assert early.value.code is Code.LEASE_NOT_READY
    with pytest.raises(Unavailable):
        lease.wait(0.02)
    device.let_go()
    assert lease.wait(20).ready
    assert wrong_pages(cache.arena, lease.composition[0][0]) == []


def test_awaiting_leaves_the_event_loop_free(cache: AdapterCache, device: HeldDevice) -> None:
    async def both() -> list[str]:
        order = []

        async def wait() -> None:
            await cache.acquire("acme/a", tenant="acme")
            order.append("ready")

        async def other() -> None:
            while not device.copies_queued:
                cache.pump()
                await asyncio.sleep(0)
            order.append("other work")
            device.let_go()

        await asyncio.gather(wait(), other())
        return order

    device.hold()
    assert asyncio.run(both()) == ["other work", "ready"]


def test_awaiting_a_failure_raises_it(cache: AdapterCache) -> None:
    async def use() -> None:
        await cache.acquire("acme/none", tenant="acme")

    with pytest.raises(AdapterdError) as refused:
        asyncio.run(use())
    assert refused.value.code is Code.NOT_FOUND


def test_a_waiting_thread_is_woken_by_a_release(cache: AdapterCache, loader: MemoryLoader) -> None:
    loader.publish("acme/large", 8)
    held = cache.acquire("acme/a", tenant="acme").wait(20)
    waiting = cache.acquire("acme/large", tenant="acme")
    threading.Thread(target=held.release).start()
    assert waiting.wait(20).ready


def test_closing_cancels_a_load_that_runs(loader: MemoryLoader) -> None:
    barrier = loader.barriers["resolve acme/a"] = Barrier()
    config = CacheConfig(vram_bytes=8 * PAGE_BYTES, host_bytes=8 * PAGE_BYTES, page_bytes=PAGE_BYTES)
    before = set(threading.enumerate())
    device = CpuDevice()
    cache = AdapterCache(config, base=loader.base, host=host_over(loader, config, device), device=device)
    with cache:
        lease = cache.acquire("acme/a", tenant="acme")
        barrier.await_arrival()
        queued = [cache.acquire("acme/b", tenant="acme") for _ in range(5)]
        closing = threading.Thread(target=cache.__exit__, args=(None, None, None))
        closing.start()
        for waiting in (lease, *queued):
            with pytest.raises(AdapterdError) as closed:
                waiting.wait(20)
            assert closed.value.code is Code.CACHE_CLOSED
        barrier.open()
        closing.join(20)
    device.close()
    assert set(threading.enumerate()) <= before
    assert "prepare acme/a" not in loader.calls


def test_many_threads_churn(cache: AdapterCache, loader: MemoryLoader) -> None:
    """Several users at once, some dropping their leases; at the end nothing is held and nothing is lost."""
    for index in range(6):
        loader.publish(f"acme/n{index}", 1 + index % 3)
    wrong: list[object] = []

    def use(start: int) -> None:
        for index in range(25):
            lease = cache.acquire(f"acme/n{(start + index) % 6}", tenant="acme").wait(30)
            with cache.begin_step([lease]):
                wrong.extend(wrong_pages(cache.arena, lease.composition[0][0]))
            if index % 5:
                lease.release()

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    del threads
    gc.collect()
    cache.pump()
    statistics = cache.statistics()
    assert wrong == []
    assert statistics.leaked_leases == 4 * 5
    assert statistics.leases[LeaseState.RELEASED] == 4 * 25
    assert sum(statistics.leases.values()) == 4 * 25
    assert statistics.vram_free_bytes + sum(statistics.vram_bytes.values()) == 8 * PAGE_BYTES


@pytest.mark.parametrize("where", ["resolve", "prepare", "fill"])
def test_a_source_that_hangs_does_not_keep_the_cache_from_closing(loader: MemoryLoader, where: str) -> None:
    barrier = loader.barriers[f"{where} acme/a"] = Barrier()
    config = CacheConfig(vram_bytes=8 * PAGE_BYTES, host_bytes=8 * PAGE_BYTES, page_bytes=PAGE_BYTES, close_seconds=0.0)
    before = set(threading.enumerate())
    device = CpuDevice()
    with AdapterCache(config, base=loader.base, host=host_over(loader, config, device), device=device) as cache:
        lease = cache.acquire("acme/a", tenant="acme")
        barrier.await_arrival()
    assert lease.problem is not None
    assert lease.problem.code is Code.CACHE_CLOSED
    device.close()
    barrier.open()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert set(threading.enumerate()) <= before
