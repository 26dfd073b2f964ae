"""The contract of devices on CUDA, for each way to ask it; and that nothing waits on the host."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from adapterd.gpu_cache.cuda_device import CudaDevice
from adapterd.gpu_cache.cuda_driver import TorchDriver, prove
from adapterd.gpu_cache.cuda_runtime import BATCHES_SINCE, CudaRuntime, loaded_runtime
from adapterd.gpu_cache.device import Device
from adapterd.loader.errors import AdapterdError, Code
from contracts.device import PAGE, DeviceContract, copy_all
from fakes.delayed_cuda import DelayedCuda

LONG = int(2e8)
"""Cycles: about 0.1 s."""


def runtime(*, batched: bool) -> CudaRuntime:
    path = loaded_runtime()
    assert path is not None, "torch's wheels bring the runtime library along"
    return CudaRuntime(path, 0, batched=batched)


class CudaContract(DeviceContract):
    """What is more to say of a device that runs by itself."""

    def finish(self, device: Device) -> None:
        torch.cuda.synchronize()

    def test_an_event_is_not_done_before_its_stream_gets_there(self, device: Device) -> None:
        stream = device.new_stream()
        torch.cuda._sleep(LONG)  # in the current stream
        device.wait(stream, device.record(device.compute))
        event = device.record(stream)
        assert not event.done()
        torch.cuda.synchronize()
        assert event.done()

    def test_an_event_that_is_not_done_leaves_no_error_behind(self, device: Device) -> None:
        torch.cuda._sleep(LONG)
        event = device.record(device.compute)
        assert not event.done()
        assert float((torch.ones(4, device="cuda:0") + 1).sum()) == 8  # torch looks for errors behind each launch
        assert event.done()

    @pytest.mark.parametrize("memory", ["allocated", "adopted"])
    def test_nothing_waits_for_what_is_enqueued(self, device: Device, memory: str) -> None:
        """Waits, scrubs, copies, marks and queries are all through while the GPU is still at the first kernel."""
        arena = device.allocate_arena(16 * PAGE)
        mapped = mmap.mmap(-1, 16 * PAGE)
        host = device.allocate_host(16 * PAGE) if memory == "allocated" else device.adopt_host(mapped)
        host.fill_(1)
        streams = device.new_stream(), device.new_stream()
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        first = device.record(device.compute)
        for _ in range(8):
            for stream in streams:
                device.wait(stream, first)
                device.zero(stream, arena)
                device.copy_runs(stream, arena, host, [(i, 15 - i, 1) for i in range(16)], PAGE)
                device.wait(device.compute, device.record(stream))
        last = device.record(device.compute)
        assert not first.done()
        host.fill_(9)  # read when the copies execute
        assert not first.done(), "the host has waited"
        torch.cuda.synchronize()
        assert last.done()
        assert int(arena.min()) == int(arena.max()) == 9

    def test_any_thread_may_enqueue(self, device: Device) -> None:
        arena, host, stream = device.allocate_arena(PAGE), device.allocate_host(PAGE), device.new_stream()
        host.fill_(5)

        def work() -> None:
            device.wait(stream, device.record(device.compute))
            copy_all(device, stream, arena, host)
            device.zero(stream, arena[:16])
            event = device.record(stream)
            while not event.done():
                pass

        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(work).result()
        assert (int(arena[:16].max()), int(arena[16:].min())) == (0, 5)

    def test_the_compute_stream_is_torchs_current_one(self, device: Device) -> None:
        usual = device.compute
        with torch.cuda.stream(torch.cuda.Stream()):
            inside = device.compute
            assert inside == torch.cuda.current_stream().cuda_stream
            torch.cuda._sleep(LONG)
            event = device.record(inside)
            assert not event.done()
        assert device.compute == usual != inside
        torch.cuda.synchronize()
        assert event.done()

    def test_host_memory_is_pinned(self, device: Device, foreign: mmap.mmap) -> None:
        assert device.allocate_host(4096).is_pinned()
        adopted = device.adopt_host(foreign)
        assert adopted.is_pinned()
        device.disown_host(adopted)
        assert not adopted.is_pinned()


class TestBatches(CudaContract):
    def make(self) -> Device:
        return CudaDevice(0, runtime(batched=True))


class TestRuns(CudaContract):
    def make(self) -> Device:
        return CudaDevice(0, runtime(batched=False))


class TestTorch(CudaContract):
    def make(self) -> Device:
        return CudaDevice(0, TorchDriver(0))


class TestDelayed(CudaContract):
    def make(self) -> Device:
        return DelayedCuda()


@pytest.fixture
def chosen() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


def test_the_fastest_way_is_chosen_by_itself(chosen: CudaDevice) -> None:
    """Else every figure would silently be that of the stand-in."""
    major, minor = (int(part) for part in str(torch.version.cuda).split(".")[:2])
    assert chosen.copy_method == ("batch" if 1000 * major + 10 * minor >= BATCHES_SINCE else "run")


@pytest.mark.parametrize("way", ["batch", "run", "torch"])
def test_every_way_proves_itself(way: str) -> None:
    driver = TorchDriver(0) if way == "torch" else runtime(batched=way == "batch")
    assert driver.copy_method == way
    prove(driver, 0)


def test_what_does_not_arrive_is_found_out() -> None:
    class Lazy(TorchDriver):
        def zero(self, stream: int, dst: torch.Tensor) -> None:
            """Does nothing."""

    with pytest.raises(AdapterdError) as found:
        prove(Lazy(0), 0)
    assert found.value.code is Code.DEVICE_ERROR


def test_a_stream_of_the_devices_own_does_not_wait_for_itself() -> None:
    waited: list[tuple[int, int]] = []

    class Counting(TorchDriver):
        def wait(self, stream: int, event: int) -> None:
            waited.append((stream, event))
            super().wait(stream, event)

    device = CudaDevice(0, Counting(0))
    first, second = device.new_stream(), device.new_stream()
    mark = device.record(first)
    device.wait(first, mark)
    assert waited == []
    device.wait(second, mark)
    device.wait(device.compute, mark)
    device.wait(device.compute, device.record(device.compute))
    assert [stream for stream, _ in waited] == [second, device.compute, device.compute]
    device.close()


def test_a_refused_call_leaves_no_error_behind() -> None:
    nobodys = mmap.mmap(-1, PAGE)
    address = torch.frombuffer(nobodys, dtype=torch.uint8).data_ptr()
    with pytest.raises(AdapterdError, match="cudaErrorHostMemoryNotRegistered") as refused:
        runtime(batched=False).unregister(address)
    assert refused.value.code is Code.DEVICE_ERROR
    assert float((torch.ones(4, device="cuda:0") + 1).sum()) == 8


def test_no_such_device() -> None:
    with pytest.raises(AdapterdError) as refused:
        CudaDevice(torch.cuda.device_count())
    assert refused.value.code is Code.DEVICE_ERROR


def test_an_arena_that_does_not_fit(chosen: CudaDevice) -> None:
    with pytest.raises(AdapterdError) as refused:
        chosen.allocate_arena(1 << 50)
    assert refused.value.code is Code.DEVICE_ERROR
