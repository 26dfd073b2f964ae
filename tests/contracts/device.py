"""What every `Device` must do. A test module subclasses it for its implementation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from adapterd.gpu_cache.device import Device

N = 1 << 20


class DeviceContract:
    """Subclasses give `make` and `finish`."""

    def make(self) -> Device:
        raise AssertionError("subclasses make their device")

    def finish(self, device: Device) -> None:
        """Returns once everything that is enqueued has executed."""
        raise AssertionError("subclasses know how")

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = self.make()
        yield device
        device.close()

    def test_memory_has_the_asked_size_and_the_arena_is_zeroed(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(N)
        assert (arena.dtype, arena.numel()) == (torch.uint8, N)
        assert (host.dtype, host.numel(), host.device.type) == (torch.uint8, N, "cpu")
        assert int(arena.max()) == 0

    def test_memory_made_in_inference_mode_can_be_written_outside_of_it(self, device: Device) -> None:
        with torch.inference_mode():
            arena, host = device.allocate_arena(N), device.allocate_host(N)
        host.fill_(7)
        device.copy(device.new_stream(), arena, host)
        self.finish(device)
        assert int(arena.min()) == 7

    def test_a_copy_has_arrived_when_its_event_is_done(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(N)
        host.copy_(torch.arange(N) % 251)
        stream = device.new_stream()
        device.copy(stream, arena[1000:5000], host[2000:6000])
        event = device.record(stream)
        self.finish(device)
        assert event.done()
        assert torch.equal(arena[1000:5000].cpu(), host[2000:6000])
        assert int(arena[:1000].max()) == int(arena[5000:].max()) == 0

    def test_zero(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(N)
        host.fill_(7)
        stream = device.new_stream()
        device.copy(stream, arena, host)
        device.zero(stream, arena[100:200])
        self.finish(device)
        assert int(arena[100:200].max()) == 0
        assert int(arena[:100].min()) == int(arena[200:].min()) == 7

    def test_a_stream_executes_in_order(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(8 * N)
        for value in range(8):
            host[value * N : (value + 1) * N] = value + 1
        stream = device.new_stream()
        for value in range(8):
            device.copy(stream, arena, host[value * N : (value + 1) * N])
        self.finish(device)
        assert int(arena.min()) == int(arena.max()) == 8

    def test_a_wait_orders_two_streams(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(N)
        host.fill_(9)
        first, second = device.new_stream(), device.new_stream()
        for _ in range(20):
            device.copy(first, arena, host)
            device.wait(second, device.record(first))
            device.zero(second, arena)
            device.wait(first, device.record(second))
        self.finish(device)
        assert int(arena.max()) == 0

    def test_a_copy_stream_waits_for_compute(self, device: Device) -> None:
        event = device.record(device.compute)
        stream = device.new_stream()
        device.wait(stream, event)
        behind = device.record(stream)
        self.finish(device)
        assert event.done()
        assert behind.done()

    def test_compute_waits_for_a_copy_stream(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(N)
        host.fill_(3)
        stream = device.new_stream()
        device.copy(stream, arena, host)
        device.wait(device.compute, device.record(stream))
        behind = device.record(device.compute)
        self.finish(device)
        assert behind.done()
        assert int(arena.min()) == 3

    def test_unequal_sizes_are_misuse(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(N)
        with pytest.raises(ValueError, match="copy of"):
            device.copy(device.new_stream(), arena[:10], host[:11])

    def test_streams_are_told_apart(self, device: Device) -> None:
        streams = [device.compute, device.new_stream(), device.new_stream()]
        assert device.compute == streams[0]
        assert len(set(streams)) == 3

    def test_close_finishes_what_is_enqueued_and_is_idempotent(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(N)
        host.fill_(5)
        stream = device.new_stream()
        device.copy(stream, arena, host)
        device.close()
        device.close()
        assert int(arena.min()) == 5
