"""What an `AdapterCache` must do on every device that runs by itself. Bytes are checked, not only books."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
import torch

from adapterd.gpu_cache import AdapterCache, CacheConfig, Lease, Place
from adapterd.gpu_cache.device import Device
from adapterd.loader.errors import Code, Failed
from fakes.adapters import PAGE_BYTES, MemoryLoader, tag, wrong_pages
from fakes.cache_world import host_over

VRAM_PAGES, HOST_PAGES = 8, 24


class CacheContract:
    """Subclasses give `make`."""

    def make(self) -> Device:
        raise AssertionError("subclasses make their device")

    @pytest.fixture
    def loader(self) -> MemoryLoader:
        return MemoryLoader()

    @pytest.fixture
    def cache(self, loader: MemoryLoader) -> Iterator[AdapterCache]:
        device = self.make()
        config = CacheConfig(
            vram_bytes=VRAM_PAGES * PAGE_BYTES, host_bytes=HOST_PAGES * PAGE_BYTES, page_bytes=PAGE_BYTES
        )
        host = host_over(loader, config, device)
        with AdapterCache(config, base=loader.base, host=host, device=device) as cache:
            yield cache
        device.close()

    def test_the_base_is_ready_at_once(self, cache: AdapterCache) -> None:
        lease = cache.acquire(None, tenant="acme")
        assert lease.ready
        assert lease.composition == ()

    def test_a_lease_becomes_ready_with_the_right_bytes(self, cache: AdapterCache, loader: MemoryLoader) -> None:
        version = loader.publish("acme/finance", pages=3)
        with cache.acquire("acme/finance", tenant="acme").wait(20) as lease:
            ((resident, weight),) = lease.composition
            assert weight == 1.0
            assert resident.key.digest == version.digest
            assert len(resident.pages) == 3
            assert wrong_pages(cache.arena, resident) == []

    def test_a_lease_can_be_awaited(self, cache: AdapterCache, loader: MemoryLoader) -> None:
        loader.publish("acme/finance", pages=2)

        async def use() -> bool:
            lease = await cache.acquire("acme/finance", tenant="acme")
            return lease.ready

        assert asyncio.run(use())

    def test_a_composition_has_all_its_parts(self, cache: AdapterCache, loader: MemoryLoader) -> None:
        versions = [loader.publish(f"acme/{name}", pages=2) for name in "abc"]
        wish = [("acme/a", 0.5), ("acme/b", -1.0), ("acme/c", 2.0)]
        lease = cache.acquire(wish, tenant="acme").wait(20)
        assert {r.key.digest: w for r, w in lease.composition} == {
            v.digest: w for v, (_, w) in zip(versions, wish, strict=True)
        }
        assert [r.key.digest for r, _ in lease.composition] == sorted(v.digest for v in versions)
        assert all(wrong_pages(cache.arena, resident) == [] for resident, _ in lease.composition)

    def test_churn_never_shows_a_step_foreign_bytes(self, cache: AdapterCache, loader: MemoryLoader) -> None:
        """More adapters than fit. Reads are enqueued, leases released at once, what was read is compared at the end."""
        names = [f"{tenant}/a{i}" for tenant in ("acme", "blue") for i in range(6)]
        for index, name in enumerate(names):
            loader.publish(name, pages=1 + index % 4)
        chosen = random.Random(7)
        seen: list[tuple[torch.Tensor, int]] = []
        for _ in range(60):
            name = chosen.choice(names)
            with cache.acquire(name, tenant=name.partition("/")[0]).wait(20) as lease:
                seen += _read_in_a_step(cache, lease)
        assert len(seen) > 100
        assert all(bool((words.cpu() == expected).all()) for words, expected in seen)
        statistics = cache.statistics()
        assert statistics.vram_free_bytes + sum(statistics.vram_bytes.values()) == VRAM_PAGES * PAGE_BYTES
        assert statistics.host_hits > 0
        assert statistics.misses > 0

    def test_a_released_lease_is_refused_by_a_step(self, cache: AdapterCache, loader: MemoryLoader) -> None:
        loader.publish("acme/finance")
        lease = cache.acquire("acme/finance", tenant="acme").wait(20)
        lease.release()
        with pytest.raises(Failed) as refused:
            cache.begin_step([lease])
        assert refused.value.code is Code.LEASE_RELEASED
        assert cache.statistics().steps_in_flight == 0

    def test_a_reload_of_the_base_makes_old_leases_stale(self, cache: AdapterCache, loader: MemoryLoader) -> None:
        loader.publish("acme/finance", pages=VRAM_PAGES)
        lease = cache.acquire("acme/finance", tenant="acme").wait(20)
        ((old, _),) = lease.composition
        with cache.begin_step([lease]):
            cache.rebind(loader.base)
            assert cache.statistics().vram_free_bytes == 0  # the step still reads them
        with pytest.raises(Failed) as stale:
            cache.begin_step([lease])
        assert stale.value.code is Code.SLOT_STALE
        assert cache.statistics().vram_free_bytes == VRAM_PAGES * PAGE_BYTES
        ((new, _),) = cache.acquire("acme/finance", tenant="acme").wait(20).composition
        assert (new.slot, new.generation) != (old.slot, old.generation)
        assert cache.statistics().adapters[Place.RESIDENT] == 1


def _read_in_a_step(cache: AdapterCache, lease: Lease) -> list[tuple[torch.Tensor, int]]:
    """Enqueues a read of every page; (what it will have read, the word that must fill it)."""
    words = cache.arena.view(torch.int64).view(-1, PAGE_BYTES // 8)
    with cache.begin_step([lease, None]):
        return [
            (words[page].clone(), tag(resident.key.digest, index))
            for resident, _ in lease.composition
            for index, page in enumerate(resident.pages)
        ]
