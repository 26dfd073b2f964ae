from __future__ import annotations

import threading

import pytest
import torch

from adapterd.gpu_cache import open_device
from adapterd.gpu_cache.cpu_device import CpuDevice
from adapterd.gpu_cache.device import Device
from adapterd.loader.errors import AdapterdError, Code
from contracts.device import DeviceContract
from fakes.devices import HeldDevice, SimulatedDevice


class TestCpu(DeviceContract):
    def make(self) -> Device:
        return CpuDevice()

    def finish(self, device: Device) -> None:
        assert isinstance(device, CpuDevice)
        for stream in device.streams:
            mark = threading.Event()
            stream.submit(mark.set)
            assert mark.wait(20)


class TestHeld(TestCpu):
    def make(self) -> Device:
        return HeldDevice()


class TestSimulated(DeviceContract):
    def make(self) -> Device:
        return SimulatedDevice(seed=3)

    def finish(self, device: Device) -> None:
        assert isinstance(device, SimulatedDevice)
        device.drain()


@pytest.mark.parametrize("kind", ["held", "simulated"])
def test_host_bytes_are_read_when_the_copy_executes(kind: str) -> None:
    device = HeldDevice() if kind == "held" else SimulatedDevice()
    arena, host = device.allocate_arena(16), device.allocate_host(16)
    host.fill_(1)
    if isinstance(device, HeldDevice):
        device.hold()
    stream = device.new_stream()
    device.copy(stream, arena, host)
    event = device.record(stream)
    host.fill_(2)
    assert not event.done()
    device.close()
    assert event.done()
    assert torch.equal(arena, torch.full((16,), 2, dtype=torch.uint8))


def test_cpu_streams_end_with_the_device() -> None:
    before = threading.active_count()
    device = CpuDevice()
    device.new_stream(), device.new_stream()
    assert threading.active_count() == before + 2
    device.close()
    assert threading.active_count() == before


def test_work_that_fails_in_a_cpu_stream_is_told_by_the_marks_behind_it() -> None:
    device = CpuDevice()
    arena, good, failed = device.allocate_arena(16), device.new_stream(), device.new_stream()
    with torch.inference_mode():
        nobody_may_write = torch.zeros(16, dtype=torch.uint8)
    device.copy(failed, nobody_may_write, arena)
    behind, other = device.record(failed), device.record(good)
    device.wait(good, behind)  # nobody hangs
    device.close()
    with pytest.raises(AdapterdError) as broken:
        behind.done()
    assert broken.value.code is Code.DEVICE_ERROR
    assert other.done()


@pytest.mark.parametrize("seed", range(5))
def test_simulated_streams_interleave(seed: int) -> None:
    """Two unordered streams run in an order that the seed decides, each in its own order."""

    def order(seed: int) -> list[str]:
        device, log = SimulatedDevice(seed), list[str]()
        streams = {name: device.new_stream() for name in "ab"}
        for index in range(10):
            for name, stream in streams.items():
                device.launch(stream, lambda entry=f"{name}{index}": log.append(entry))
        device.drain()
        return log

    log = order(seed)
    assert log == order(seed)
    assert [e for e in log if e[0] == "a"] == [f"a{i}" for i in range(10)]
    assert log != order(seed + 100)


@pytest.mark.parametrize("name", ["cpu:1", "tpu", "cuda:x", ""])
def test_a_device_that_does_not_exist(name: str) -> None:
    with pytest.raises(AdapterdError) as refused:
        open_device(name)
    assert refused.value.code is Code.SETTINGS_INVALID


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda() -> None:
    with pytest.raises(AdapterdError) as refused:
        open_device("cuda:0")
    assert refused.value.code is Code.DEVICE_ERROR
