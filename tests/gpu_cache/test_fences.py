"""I13: fences go both ways. Each is taken away from the device in turn, and the harness must notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adapterd.gpu_cache.fences import Readers
from fakes.cache_world import World
from fakes.devices import DefectiveDevice, SimulatedDevice

SEEDS = range(25)
Defect = Callable[[SimulatedDevice], DefectiveDevice]


def churn(seed: int, defect: Defect | None) -> list[str]:
    """Steps and evictions over a few pages, with kernels and copies executing late; what kernels saw wrongly."""
    with World(vram=4, host=32, seed=seed, defect=defect) as world:
        for index in range(5):
            world.loader.publish(f"acme/a{index}", 2)
        for turn in range(20):
            lease = world.acquire(f"acme/a{(turn * 3 + seed) % 5}")
            for _ in range(200):
                world.pool.run_one()
                world.cache.pump()
                if lease.ready:
                    break
                world.step()  # a step of base rows: copies are issued behind it, while older kernels still run
                world.device.run(2)
            assert lease.ready
            world.step(lease)
            lease.release()
        world.device.drain()
        return world.violations


def without_copy_waits(device: SimulatedDevice) -> DefectiveDevice:
    return DefectiveDevice(device, drop_waits_of="copy")


def without_compute_waits(device: SimulatedDevice) -> DefectiveDevice:
    return DefectiveDevice(device, drop_waits_of="compute")


def with_early_marks(device: SimulatedDevice) -> DefectiveDevice:
    return DefectiveDevice(device, early_marks=True)


def with_early_marks_and_no_compute_waits(device: SimulatedDevice) -> DefectiveDevice:
    return DefectiveDevice(device, early_marks=True, drop_waits_of="compute")


@pytest.mark.parametrize("seed", SEEDS)
def test_no_kernel_ever_reads_foreign_bytes(seed: int) -> None:
    assert churn(seed, None) == []


def test_a_copy_that_does_not_wait_for_readers_is_noticed() -> None:
    assert any(churn(seed, without_copy_waits) for seed in SEEDS)


def test_a_reader_that_does_not_wait_for_the_copy_is_noticed() -> None:
    """`ready` already says that the copy is done; with marks that come early, only the stream's wait is left."""
    assert any(churn(seed, with_early_marks_and_no_compute_waits) for seed in SEEDS)


@pytest.mark.parametrize("defect", [with_early_marks, without_compute_waits])
def test_each_of_the_two_guards_of_a_reader_suffices(defect: Defect) -> None:
    assert not any(churn(seed, defect) for seed in SEEDS)


class _Mark:
    def done(self) -> bool:
        return False


def test_the_newest_mark_of_each_stream_is_kept() -> None:
    device = SimulatedDevice()
    one, two = device.compute, device.new_stream()
    readers, marks = Readers(), [_Mark() for _ in range(3)]
    assert readers.fence().events == ()
    readers.note(one, marks[0])
    readers.note(two, marks[1])
    readers.note(one, marks[2])
    assert set(readers.fence().events) == {marks[2], marks[1]}
