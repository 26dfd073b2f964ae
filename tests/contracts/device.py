"""What every `Device` must do. A test module subclasses it for its implementation."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from adapterd.gpu_cache.device import Device, Run, Stream
from adapterd.loader.errors import AdapterdError, Code

N = 1 << 20
PAGE = 4096


def copy_all(device: Device, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
    """dst ← src."""
    device.copy_runs(stream, dst, src, [(0, 0, 1)], dst.numel())


def numbered(count: int) -> torch.Tensor:
    """uint8 [count, PAGE]: row i is filled with i + 1."""
    return torch.arange(1, count + 1, dtype=torch.uint8).repeat_interleave(PAGE).view(count, PAGE)


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

    @pytest.fixture(params=["read-only", "writable"])
    def foreign(self, request: pytest.FixtureRequest) -> Iterator[mmap.mmap]:
        """16 numbered pages that another process could have made."""
        handle = os.memfd_create("foreign")
        try:
            os.write(handle, numbered(16).numpy().tobytes())
            access = mmap.ACCESS_READ if request.param == "read-only" else mmap.ACCESS_WRITE
            memory = mmap.mmap(handle, 16 * PAGE, access=access)
        finally:
            os.close(handle)
        yield memory  # unmapped when the last tensor over it is gone

    def test_memory_has_the_asked_size_and_the_arena_is_zeroed(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(N)
        assert (arena.dtype, arena.numel()) == (torch.uint8, N)
        assert (host.dtype, host.numel(), host.device.type) == (torch.uint8, N, "cpu")
        assert int(arena.max()) == 0

    def test_memory_made_in_inference_mode_can_be_written_outside_of_it(self, device: Device) -> None:
        with torch.inference_mode():
            arena, host = device.allocate_arena(N), device.allocate_host(N)
        host.fill_(7)
        copy_all(device, device.new_stream(), arena, host)
        self.finish(device)
        assert int(arena.min()) == 7

    # Copies

    def test_a_copy_has_arrived_when_its_event_is_done(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(N)
        host.copy_(torch.arange(N) % 251)
        stream = device.new_stream()
        copy_all(device, stream, arena[1000:5000], host[2000:6000])
        event = device.record(stream)
        self.finish(device)
        assert event.done()
        assert event.done(), "and stays so"
        assert torch.equal(arena[1000:5000].cpu(), host[2000:6000])
        assert int(arena[:1000].max()) == int(arena[5000:].max()) == 0

    @pytest.mark.parametrize(
        "runs",
        [
            pytest.param([(0, 0, 16)], id="one run"),
            pytest.param([(i, 15 - i, 1) for i in range(16)], id="backwards"),
            pytest.param([(0, 8, 3), (5, 0, 2), (12, 4, 1)], id="some"),
            pytest.param([(3, 1, 1), (3, 2, 1)], id="one source twice"),
            pytest.param([], id="none"),
        ],
    )
    def test_runs_of_pages_go_where_they_should_and_nowhere_else(self, device: Device, runs: list[Run]) -> None:
        arena, host = device.allocate_arena(16 * PAGE), device.allocate_host(16 * PAGE)
        host.view(16, PAGE).copy_(numbered(16))
        wanted = torch.zeros(16, PAGE, dtype=torch.uint8)
        for source, target, length in runs:
            wanted[target : target + length] = numbered(16)[source : source + length]
        device.copy_runs(device.new_stream(), arena, host, runs, PAGE)
        self.finish(device)
        assert torch.equal(arena.view(16, PAGE).cpu(), wanted)

    @pytest.mark.parametrize("run", [(-1, 0, 1), (0, -1, 1), (8, 0, 1), (0, 4, 1), (5, 1, 4), (6, 0, 3), (0, 0, 0)])
    def test_pages_that_are_outside_are_misuse(self, device: Device, run: Run) -> None:
        arena, host = device.allocate_arena(4 * PAGE), device.allocate_host(8 * PAGE)
        with pytest.raises(ValueError, match="copy of"):
            device.copy_runs(device.new_stream(), arena, host, [(0, 0, 1), run], PAGE)

    def test_two_streams_share_a_transfer(self, device: Device) -> None:
        arena, host = device.allocate_arena(16 * PAGE), device.allocate_host(16 * PAGE)
        host.view(16, PAGE).copy_(numbered(16))
        streams = device.new_stream(), device.new_stream()
        for half, stream in enumerate(streams):
            device.copy_runs(stream, arena, host, [(8 * half + i, 15 - 8 * half - i, 1) for i in range(8)], PAGE)
        events = [device.record(stream) for stream in streams]
        for event in events:
            device.wait(device.compute, event)
        behind = device.record(device.compute)
        self.finish(device)
        assert behind.done()
        assert all(event.done() for event in events)
        assert torch.equal(arena.view(16, PAGE).cpu(), numbered(16).flip(0))

    def test_zero(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(N)
        host.fill_(7)
        stream = device.new_stream()
        copy_all(device, stream, arena, host)
        device.zero(stream, arena[100:200])
        self.finish(device)
        assert int(arena[100:200].max()) == 0
        assert int(arena[:100].min()) == int(arena[200:].min()) == 7

    # Order

    def test_a_stream_executes_in_order(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(8 * N)
        for value in range(8):
            host[value * N : (value + 1) * N] = value + 1
        stream = device.new_stream()
        for value in range(8):
            device.copy_runs(stream, arena, host, [(value, 0, 1)], N)
        self.finish(device)
        assert int(arena.min()) == int(arena.max()) == 8

    def test_a_wait_orders_two_streams(self, device: Device) -> None:
        arena, host = device.allocate_arena(N), device.allocate_host(N)
        host.fill_(9)
        first, second = device.new_stream(), device.new_stream()
        for _ in range(20):
            copy_all(device, first, arena, host)
            device.wait(second, device.record(first))
            device.zero(second, arena)
            device.wait(first, device.record(second))
        self.finish(device)
        assert int(arena.max()) == 0

    def test_a_wait_is_for_the_mark_that_was_there(self, device: Device) -> None:
        """The events behind dropped marks are used again; that must not move a wait that is enqueued."""
        arena, host = device.allocate_arena(16 * PAGE), device.allocate_host(16 * PAGE)
        host.view(16, PAGE).copy_(numbered(16))
        streams = [device.new_stream() for _ in range(3)]
        for _ in range(30):
            copy_all(device, streams[0], arena, host)
            device.wait(streams[1], device.record(streams[0]))
            device.record(streams[2])
            device.zero(streams[1], arena)
            device.wait(streams[0], device.record(streams[1]))
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
        copy_all(device, stream, arena, host)
        device.wait(device.compute, device.record(stream))
        behind = device.record(device.compute)
        self.finish(device)
        assert behind.done()
        assert int(arena.min()) == 3

    def test_streams_are_told_apart(self, device: Device) -> None:
        streams = [device.compute, device.new_stream(), device.new_stream()]
        assert device.compute == streams[0]
        assert len(set(streams)) == 3

    # Memory that somebody else made

    def test_foreign_memory_can_be_copied_from(self, device: Device, foreign: mmap.mmap) -> None:
        arena, adopted = device.allocate_arena(16 * PAGE), device.adopt_host(foreign)
        assert (adopted.dtype, adopted.numel(), adopted.device.type) == (torch.uint8, 16 * PAGE, "cpu")
        device.copy_runs(device.new_stream(), arena, adopted, [(0, 15, 1), (1, 0, 15)], PAGE)
        self.finish(device)
        assert arena.view(16, PAGE)[:, 0].tolist() == [*range(2, 17), 1]
        device.disown_host(adopted)

    def test_foreign_memory_is_seen_as_it_is_when_the_copy_executes(self, device: Device) -> None:
        memory = mmap.mmap(-1, PAGE)
        arena, adopted = device.allocate_arena(PAGE), device.adopt_host(memory)
        memory[:] = b"\x07" * PAGE
        copy_all(device, device.new_stream(), arena, adopted)
        self.finish(device)
        assert int(arena.min()) == 7

    def test_foreign_memory_is_adopted_once_and_can_come_back(self, device: Device, foreign: mmap.mmap) -> None:
        adopted = device.adopt_host(foreign)
        with pytest.raises(AdapterdError) as twice:
            device.adopt_host(foreign)
        assert twice.value.code is Code.DEVICE_ERROR
        device.disown_host(adopted)
        device.disown_host(adopted)
        again = device.adopt_host(foreign)
        assert again.data_ptr() == adopted.data_ptr()

    def test_memory_stays_mapped_while_it_is_adopted(self, device: Device, foreign: mmap.mmap) -> None:
        adopted = device.adopt_host(foreign)
        with pytest.raises(BufferError):
            foreign.close()
        device.disown_host(adopted)
        del adopted
        foreign.close()

    def test_nothing_else_is_adopted(self, device: Device) -> None:
        with pytest.raises(ValueError, match="contiguous and not empty"):
            device.adopt_host(b"")
        with pytest.raises(ValueError, match="contiguous and not empty"):
            device.adopt_host(memoryview(bytes(64))[::2])
        device.disown_host(torch.zeros(8, dtype=torch.uint8))  # nobody's: nothing happens

    # Ends

    def test_marks_are_used_again(self, device: Device) -> None:
        stream, kept = device.new_stream(), []
        for _ in range(20):
            kept = [*kept[-3:], device.record(stream), device.record(device.compute)]
            self.finish(device)
        alive = device.events_alive
        for _ in range(100):
            kept = [*kept[-3:], device.record(stream), device.record(device.compute)]
            self.finish(device)
        assert device.events_alive == alive <= 7

    def test_no_mark_outlives_the_device(self) -> None:
        device = self.make()
        stream = device.new_stream()
        kept = [device.record(stream) for _ in range(5)]
        self.finish(device)
        device.close()
        assert all(event.done() for event in kept)
        del kept
        assert device.events_alive == 0

    def test_close_finishes_what_is_enqueued_and_is_idempotent(self, device: Device, foreign: mmap.mmap) -> None:
        arena, adopted = device.allocate_arena(16 * PAGE), device.adopt_host(foreign)
        copy_all(device, device.new_stream(), arena, adopted)
        device.close()
        device.close()
        assert int(arena.min()) == 1
        del adopted
        foreign.close()

    def test_how_it_copies_is_told(self, device: Device) -> None:
        assert device.copy_method in {"batch", "run", "torch", "cpu", "simulated"}
