"""Churn beyond capacity on the CPU device, every row compared; `tests/gpu/test_cache_churn.py` does it on CUDA."""

from __future__ import annotations

from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.cpu_device import CpuDevice
from fakes.adapters import PAGE_BYTES, MemoryLoader
from fakes.cache_world import host_over
from fakes.churn import Churn

ADAPTERS = 48


def test_every_row_reads_its_own_adapter() -> None:
    loader, device = MemoryLoader(), CpuDevice()
    versions = [loader.publish(f"acme/a{i}", 4 - i % 2) for i in range(ADAPTERS)]
    config = CacheConfig(vram_bytes=40 * PAGE_BYTES, host_bytes=96 * PAGE_BYTES, page_bytes=PAGE_BYTES)
    host = host_over(loader, config, device)
    with AdapterCache(config, base=loader.base, host=host, device=device) as cache:
        outcome = Churn(cache, versions, rows=256, active=6, ahead=6, seed=4).run(40_000)
    device.close()
    assert outcome.wrong == 0
    assert outcome.loads > 2 * ADAPTERS, "there was churn"
