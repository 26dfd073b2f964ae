"""A million rows beyond capacity on a CUDA device, each compared there; kernels and copies start late."""

from __future__ import annotations

import torch

from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.cuda_device import CudaDevice
from adapterd.gpu_cache.device import Event, Stream
from fakes.adapters import PAGE_BYTES, MemoryLoader
from fakes.cache_world import host_over
from fakes.churn import Churn, Outcome
from fakes.delayed_cuda import DelayedCuda

PAGES = 4
ADAPTERS = 160
RESIDENT = 26
"""Two more than a step and what is on its way need: what was let go is overwritten at once."""
IN_SLAB = 80


class ForgetfulCuda(CudaDevice):
    """A defect, to see that it shows: copy streams wait for nobody."""

    def wait(self, stream: Stream, event: Event) -> None:
        if stream == self.compute:
            super().wait(stream, event)


def churn(device: CudaDevice, rows: int, *, cycles: int, seed: int) -> Outcome:
    loader = MemoryLoader()
    versions = [loader.publish(f"acme/a{i}", PAGES - i % 2) for i in range(ADAPTERS)]
    config = CacheConfig(
        device=device.name,
        vram_bytes=RESIDENT * PAGES * PAGE_BYTES,
        host_bytes=IN_SLAB * PAGES * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        pages_per_step=1000,
    )
    try:
        host = host_over(loader, config, device)
        with (
            torch.cuda.stream(torch.cuda.Stream()),
            AdapterCache(config, base=loader.base, host=host, device=device) as cache,
        ):
            return Churn(cache, versions, cycles=cycles, seed=seed).run(rows)
    finally:
        torch.cuda.synchronize()
        device.close()


def test_a_million_rows_read_their_own_adapter() -> None:
    outcome = churn(DelayedCuda(cycles=300_000, seed=1), 1_000_000, cycles=400_000, seed=1)
    assert outcome.rows >= 1_000_000
    assert outcome.wrong == 0
    assert outcome.loads > 10 * ADAPTERS, "there was churn"


def test_a_missing_fence_shows() -> None:
    """The same, with copy streams that wait for nobody and kernels that start a tenth of a second late."""
    outcome = churn(ForgetfulCuda(), 100_000, cycles=200_000_000, seed=2)
    assert outcome.wrong > 0
