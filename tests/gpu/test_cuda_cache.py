"""The contract suites of device, pages and cache, on CUDA; and fences under load."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.cuda_device import CudaDevice
from adapterd.gpu_cache.device import Device
from adapterd.loader.errors import AdapterdError, Code
from contracts.cache import CacheContract
from contracts.device import DeviceContract
from contracts.pages import PagePoolMachine
from fakes.adapters import MemoryLoader, tag

TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class TestCudaDevice(DeviceContract):
    def make(self) -> Device:
        return CudaDevice()

    def finish(self, device: Device) -> None:
        torch.cuda.synchronize()

    def test_an_event_is_not_done_before_its_stream_gets_there(self, device: Device) -> None:
        stream = device.new_stream()
        torch.cuda._sleep(int(2e8))  # cycles: about 0.1 s in the current stream
        device.wait(stream, device.record(device.compute))
        event = device.record(stream)
        assert not event.done()
        torch.cuda.synchronize()
        assert event.done()

    def test_host_memory_is_pinned(self, device: Device) -> None:
        assert device.allocate_host(4096).is_pinned()


class TestCudaCache(CacheContract):
    def make(self) -> Device:
        return CudaDevice()


def test_no_such_device() -> None:
    with pytest.raises(AdapterdError) as refused:
        CudaDevice(torch.cuda.device_count())
    assert refused.value.code is Code.DEVICE_ERROR


def test_an_arena_that_does_not_fit() -> None:
    device = CudaDevice()
    with pytest.raises(AdapterdError) as refused:
        device.allocate_arena(1 << 50)
    assert refused.value.code is Code.DEVICE_ERROR
    device.close()


def test_pages_are_not_overwritten_while_a_slow_step_reads_them() -> None:
    """The step's kernels start late; meanwhile its lease is gone and its pages are given to the next adapter."""
    loader = MemoryLoader()
    for name in "abcdef":
        loader.publish(f"acme/{name}", 4)
    config = CacheConfig(device="cuda:0", vram_bytes=4 * 256, host_bytes=24 * 256, page_bytes=256)
    seen: list[tuple[torch.Tensor, int]] = []
    with AdapterCache(config, base=loader.base, loader=loader) as cache:
        for name in "abcdef":  # warm: from here on every load is a host hit
            cache.acquire(f"acme/{name}", tenant="acme").wait(20).release()
        words = cache.arena.view(torch.int64).view(-1, 32)
        for name in "abcdef" * 3:
            lease = cache.acquire(f"acme/{name}", tenant="acme")
            while not lease.ready:
                with cache.begin_step([None]):  # issues the copy behind whatever still runs
                    pass
                cache.pump()
            with cache.begin_step([lease]):
                torch.cuda._sleep(int(4e7))
                ((resident, _),) = lease.composition
                seen += [(words[p].clone(), tag(resident.key.digest, i)) for i, p in enumerate(resident.pages)]
            lease.release()
        torch.cuda.synchronize()
    assert len(seen) == 72
    assert all(bool((read == expected).all()) for read, expected in seen)
