from __future__ import annotations

import threading

import pytest
import torch

from adapterd.gpu_cache import open_device
from adapterd.gpu_cache.cpu_device import CpuDevice
from adapterd.gpu_cache.cuda_device import CudaDevice, CudaEvent, EventPool
from adapterd.gpu_cache.device import Device
from adapterd.loader.errors import AdapterdError, Code
from contracts.device import DeviceContract, copy_all
from fakes.devices import COPY_STREAMS, POISON, DefectiveDevice, HeldDevice, HostSynchronisation, SimulatedDevice


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


class TestDefective(DeviceContract):
    """Without a defect it is as good as the one inside."""

    def make(self) -> Device:
        return DefectiveDevice(SimulatedDevice(seed=4))

    def finish(self, device: Device) -> None:
        assert isinstance(device, DefectiveDevice)
        device.drain()


@pytest.mark.parametrize("kind", ["held", "simulated"])
def test_host_bytes_are_read_when_the_copy_executes(kind: str) -> None:
    device = HeldDevice() if kind == "held" else SimulatedDevice()
    arena, host = device.allocate_arena(16), device.allocate_host(16)
    host.fill_(1)
    if isinstance(device, HeldDevice):
        device.hold()
    stream = device.new_stream()
    copy_all(device, stream, arena, host)
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
    copy_all(device, failed, nobody_may_write, arena)
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


def test_the_held_device_holds_each_stream_by_itself() -> None:
    device = HeldDevice()
    arena, host = device.allocate_arena(32), device.allocate_host(32)
    host.fill_(1)
    device.hold()
    one, two = device.new_stream(), device.new_stream()
    for stream in (one, two):
        device.copy_runs(stream, arena, host, [(0, 0 if stream is one else 1, 1)], 16)
    marks = device.record(one), device.record(two)
    device.let_go(two)
    while not marks[1].done():
        pass
    assert not marks[0].done()
    assert arena.tolist() == [0] * 16 + [1] * 16
    device.close()
    assert marks[0].done()
    assert arena.tolist() == [1] * 32


@pytest.mark.parametrize("seed", range(8))
def test_a_simulated_batch_executes_page_by_page_with_others_in_between(seed: int) -> None:
    device = SimulatedDevice(seed)
    arena, host = device.allocate_arena(64), device.allocate_host(64)
    host.copy_(torch.arange(64))
    arena.fill_(9)
    device.copy_runs(device.new_stream(), arena, host, [(0, 0, 3)], 16)
    seen: list[list[int]] = []
    for _ in range(4):
        device.run(1)
        seen.append(arena.tolist())
    assert seen[0] == [POISON] * 48 + [9] * 16, "nobody profits from the old bytes of a page not copied yet"
    assert [sum(value == POISON for value in each) for each in seen] == [48, 32, 16, 0]
    assert seen[3] == [*range(48)] + [9] * 16


def test_a_simulated_copy_from_memory_that_was_disowned_is_an_error() -> None:
    device = SimulatedDevice()
    arena, adopted = device.allocate_arena(16), device.adopt_host(bytearray(16))
    copy_all(device, device.new_stream(), arena, adopted)
    device.disown_host(adopted)
    with pytest.raises(AssertionError, match="disowned"):
        device.drain()


@pytest.mark.parametrize("blocking", ["close", "allocate_arena", "allocate_host", "adopt_host", "disown_host"])
def test_the_serving_thread_may_not_block(blocking: str) -> None:
    device = SimulatedDevice()
    memory = device.adopt_host(bytearray(16))
    arguments = {"allocate_arena": (16,), "allocate_host": (16,), "adopt_host": (bytearray(8),)}.get(blocking, ())
    with device.serving(), pytest.raises(HostSynchronisation):
        getattr(device, blocking)(*(arguments or ((memory,) if blocking == "disown_host" else ())))
    thread = threading.Thread(target=device.allocate_host, args=(16,))
    with device.serving():
        thread.start()  # another thread may
        thread.join()
    device.close()


def test_the_serving_thread_may_not_look_into_the_arena() -> None:
    device = SimulatedDevice()
    arena = device.allocate_arena(64)
    with device.serving():
        part = arena[16:32].view(torch.int64)  # a view is none
        device.zero(device.new_stream(), arena)
        torch.zeros(4) + 1  # what is not the device's may be worked with
        for look in (part.sum, part.clone, part.zero_, part[0].item, lambda: torch.zeros(2).copy_(part)):
            with pytest.raises(HostSynchronisation):
                look()
    device.close()
    assert int(part.sum()) == 0


def test_waits_of_either_copy_stream_can_be_dropped() -> None:
    for dropped in COPY_STREAMS:
        device = DefectiveDevice(SimulatedDevice(), drop_waits_of={dropped})
        streams = {name: device.new_stream() for name in COPY_STREAMS}
        never = device.record(device.inner.new_stream())
        marks = {}
        for name, stream in streams.items():
            device.wait(stream, never)
            marks[name] = device.record(stream)
        while device.inner._streams[1].queue or device.inner._streams[2].queue:
            device.run(1)
            if marks[dropped].done() and not never.done():
                break
        assert {name for name in marks if marks[name].done()} >= {dropped}


@pytest.mark.parametrize("name", ["cpu:1", "tpu", "cuda:x", ""])
def test_a_device_that_does_not_exist(name: str) -> None:
    with pytest.raises(AdapterdError) as refused:
        open_device(name)
    assert refused.value.code is Code.SETTINGS_INVALID


class _Counting:
    """As much of a driver as events and waits need; numbers count up."""

    copy_method = "none"

    def __init__(self) -> None:
        self.made, self.destroyed = 0, list[int]()
        self.waits: list[tuple[int, int]] = []
        self.new_stream = iter((7, 8, 9)).__next__

    def record(self, event: int, stream: int) -> None:
        pass

    def wait(self, stream: int, event: int) -> None:
        self.waits.append((stream, event))

    def new_event(self) -> int:
        self.made += 1
        return self.made

    def destroy_event(self, event: int) -> None:
        self.destroyed.append(event)

    def done(self, event: int) -> bool:
        return event != 1


def test_cuda_events_are_used_again_and_destroyed_once() -> None:
    driver = _Counting()
    pool = EventPool(driver)  # type: ignore[arg-type]
    kept = CudaEvent(pool, 1)
    for _ in range(10):
        event = CudaEvent(pool, 1)
        assert event.done()
    assert (driver.made, pool.alive) == (3, 3), "one kept, one given up only after the next was taken"
    del event
    pool.close()
    assert sorted(driver.destroyed) == [2, 3]
    assert not kept.done()
    late = CudaEvent(pool, 1)
    del kept, late
    assert sorted(driver.destroyed) == [1, 2, 3, 4]
    assert pool.alive == 0


def test_a_cuda_stream_waits_for_all_marks_but_those_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign stream's handle may be our own's by now: that mark is not known to be in front."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    driver = _Counting()
    device = CudaDevice(0, driver)  # type: ignore[arg-type]
    own = device.new_stream()
    foreign = device.record(8)  # a compute stream, destroyed before ours gets its handle
    late = device.new_stream()
    assert (own, late) == (7, 8)
    marks = [device.record(stream) for stream in (own, late)]
    for stream in (own, late, 5):
        for mark in (foreign, *marks):
            device.wait(stream, mark)
    assert driver.waits == [(7, 1), (7, 3), (8, 1), (8, 2), (5, 1), (5, 2), (5, 3)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda() -> None:
    with pytest.raises(AdapterdError) as refused:
        open_device("cuda:0")
    assert refused.value.code is Code.DEVICE_ERROR
