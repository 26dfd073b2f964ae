"""I13: fences go both ways. Each is taken away from the device in turn, and the harness must notice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from adapterd.gpu_cache.fences import OPEN, Fence, Readers
from fakes.cache_world import World
from fakes.devices import COPY_STREAMS, DefectiveDevice, SimulatedDevice

SEEDS = range(25)
Defect = Callable[[SimulatedDevice], DefectiveDevice]


def churn(seed: int, defect: Defect | None) -> list[str]:
    """Steps and evictions over a few pages, with kernels and copies executing late; what kernels saw wrongly.

    Two of four in a row are evicted unread: then only the marks of their copies order these and the next ones.
    """
    with World(vram=4, host=32, seed=seed, defect=defect) as world:
        for index in range(5):
            world.loader.publish(f"acme/a{index}", 1 + index % 3)  # so a page is filled by either stream in turn
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
            if turn // 2 % 2:
                world.step(lease)
            lease.release()
        world.device.drain()
        return world.violations


def defect(**what: object) -> Defect:
    return partial(DefectiveDevice, **what)


EARLY = defect(early_marks_of=COPY_STREAMS)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_kernel_ever_reads_foreign_bytes(seed: int) -> None:
    assert churn(seed, None) == []


@pytest.mark.parametrize("streams", [COPY_STREAMS, COPY_STREAMS[:1], COPY_STREAMS[1:]])
def test_a_copy_that_does_not_wait_for_readers_is_noticed(streams: tuple[str, ...]) -> None:
    """Both copy streams have to wait: each fills pages of its own."""
    assert any(churn(seed, defect(drop_waits_of=streams)) for seed in SEEDS)


@pytest.mark.parametrize("early", [COPY_STREAMS, COPY_STREAMS[:1], COPY_STREAMS[1:]])
def test_a_reader_that_does_not_wait_for_the_copies_is_noticed(early: tuple[str, ...]) -> None:
    """`ready` already says that the copies are done; with marks that come early, only the stream's waits are left."""
    assert any(churn(seed, defect(early_marks_of=early, drop_waits_of={"compute"})) for seed in SEEDS)


@pytest.mark.parametrize("guard", [EARLY, defect(drop_waits_of={"compute"})])
def test_each_of_the_two_guards_of_a_reader_suffices(guard: Defect) -> None:
    assert not any(churn(seed, guard) for seed in SEEDS)


class _Mark:
    def __init__(self, passed: bool = False) -> None:
        self.passed = passed

    def done(self) -> bool:
        return self.passed


def test_the_newest_mark_of_each_stream_is_kept() -> None:
    device = SimulatedDevice()
    one, two = device.compute, device.new_stream()
    readers, marks = Readers(), [_Mark() for _ in range(3)]
    assert readers.fence().events == ()
    readers.note(one, marks[0])
    readers.note(two, marks[1])
    readers.note(one, marks[2])
    assert set(readers.fence().events) == {marks[2], marks[1]}


def test_a_fence_is_passed_when_all_its_marks_are() -> None:
    one, two = _Mark(passed=True), _Mark()
    assert OPEN.passed()
    assert Fence((one,)).passed()
    assert not Fence((one, two)).passed()
    two.passed = True
    assert Fence((one, two)).passed()


def test_fences_are_merged_without_repeats() -> None:
    one, two = _Mark(), _Mark()
    assert Fence.merged([Fence((one, two)), OPEN, Fence((two,))]).events == (one, two)
