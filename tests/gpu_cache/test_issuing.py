"""When copies are enqueued, and how often: in front of no launch, once each, by one thread at a time (I13)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import ClassVar

import pytest
import torch

from adapterd.gpu_cache import AdapterCache, CacheConfig, LeaseState
from adapterd.gpu_cache.cache import ANSWERS_A_STEP
from adapterd.gpu_cache.device import Run, Stream
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.slabs import DeviceSlab
from adapterd.gpu_cache.waiting import LOOK_SECONDS, WAIT_COPY_SECONDS, WAIT_SECONDS
from fakes.adapters import PAGE_BYTES, ManualPool, MemoryLoader, wrong_pages
from fakes.cache_world import World, host_over
from fakes.devices import Barrier, HeldDevice, SimulatedDevice


def queued(world: World) -> int:
    return len(world.device.compute.queue)  # type: ignore[attr-defined]


def test_a_step_waits_for_a_copy_once() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        for waits in (2, 0):
            world.device.drain()
            ticket = world.cache.begin_step([lease])
            assert queued(world) <= waits
            assert bool(queued(world)) == bool(waits)
            ticket.end()


def test_while_a_step_is_open_nobody_else_issues() -> None:
    with World() as world:
        world.loader.publish("acme/a", 3)
        ticket = world.cache.begin_step([])
        lease = world.acquire("acme/a")
        world.settle()
        assert world.copied == 0
        ticket.end()
        assert world.copied == 3
        world.settle()
        assert lease.ready


def test_idle_the_whole_queue_is_issued_at_once() -> None:
    with World(pages_per_step=1) as world:
        world.loader.publish("acme/a", 3), world.loader.publish("acme/b", 3)
        leases = [world.acquire("acme/a"), world.acquire("acme/b")]
        world.pool.run_all()
        world.pump()
        assert not any(lease.ready for lease in leases)
        assert world.copied == 6


def test_after_closing_nothing_is_enqueued_any_more() -> None:
    with World() as world:
        world.loader.publish("acme/a", 3)
        ticket = world.cache.begin_step([])
        lease = world.acquire("acme/a")
        world.pool.run_all()
    assert lease.failed
    ticket.end()
    world.device.drain()
    world.cache.pump()
    assert world.copied == 0


class _Slow(HeldDevice):
    """Enqueuing a copy takes until the barrier is opened."""

    def __init__(self, barrier: Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def copy_runs(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int
    ) -> None:
        super().copy_runs(stream, dst, src, runs, page_bytes)
        self.barrier.stop()


def test_while_one_thread_issues_the_others_go_on() -> None:
    loader, barrier = MemoryLoader(), Barrier()
    loader.publish("acme/a", 1)
    device = _Slow(barrier)
    config = CacheConfig(vram_bytes=8 * PAGE_BYTES, host_bytes=8 * PAGE_BYTES, page_bytes=PAGE_BYTES)
    host = host_over(loader, config, device)
    with AdapterCache(config, base=loader.base, host=host, device=device) as cache:
        lease = cache.acquire("acme/a", tenant="acme")
        first = threading.Thread(target=lease.wait, args=(20,))
        first.start()
        barrier.await_arrival()
        for _ in range(3):
            cache.pump()  # would stop at the barrier, too
        assert device.copies_queued == 1
        barrier.open()
        first.join(20)
        assert lease.wait(20).ready
        assert wrong_pages(cache.arena, lease.composition[0][0]) == []
    device.close()


def test_a_load_takes_as_many_calls_for_many_pages_as_for_few() -> None:
    """From acquire until it is ready, on the serving thread: what grows with pages is no Python function."""
    calls = {pages: _calls_of_a_steady_load(pages) for pages in (20, 32)}
    assert calls[20] == calls[32] > 0


def _calls_of_a_steady_load(pages: int) -> int:
    with World(vram=64, host=64) as world:
        world.loader.publish("acme/a", pages)
        for _ in range(2):  # the second time the bytes are in host memory
            calls = 0

            def count(frame: FrameType, event: str, _: object) -> None:
                nonlocal calls
                calls += event == "call" and f"{os.sep}gpu_cache{os.sep}" in frame.f_code.co_filename

            sys.setprofile(count)
            try:
                lease = world.acquire("acme/a")
                world.pool.run_all()
                world.cache.pump()
            finally:
                sys.setprofile(None)
            world.device.drain()
            world.cache.pump()
            assert lease.ready
            lease.release()
            with world.cache._lock:
                shelf = world.cache._stager.shelf
                shelf.evict(next(iter(shelf.entries.values())))
            world.device.drain()
    return calls


class _Counting(HostCache):
    """Keeps how many answers it was asked to say."""

    asked: ClassVar[list[int | None]] = []

    def deliver(self, most: int | None = None) -> None:
        self.asked.append(most)
        super().deliver(most)


def test_a_step_issues_so_many_pages_and_hears_one_answer_whatever_waits() -> None:
    """What stands between two launches is bounded: all else is left to the next step."""
    device, loader, pool = SimulatedDevice(), MemoryLoader(), ManualPool()
    size = 16 * PAGE_BYTES
    config = CacheConfig(vram_bytes=size, host_bytes=size, page_bytes=PAGE_BYTES, pages_per_step=2)
    slab = DeviceSlab(device.allocate_host(size), PAGE_BYTES)
    host = _Counting(slab, loader.base, loader=loader, pool=pool, answers=pool)
    with AdapterCache(config, base=loader.base, host=host, device=device) as cache:
        refs = [f"acme/{name}" for name in "abcd"]
        for ref in refs:
            loader.publish(ref, 3)
        leases = [cache.acquire(ref, tenant="acme") for ref in refs]
        ticket = cache.begin_step([])
        pool.run_all()
        for pages in (2, 4, 6, 8, 10, 12, 12):
            host.asked.clear()
            ticket.end()
            assert device.copied_bytes == pages * PAGE_BYTES
            assert host.asked == [ANSWERS_A_STEP]
            ticket = cache.begin_step([])
        ticket.end()
        device.drain()
        cache.pump()
        assert all(lease.ready for lease in leases)


@pytest.mark.parametrize("room", [True, False])
def test_what_a_step_hears_of_takes_its_room_in_the_next(room: bool) -> None:
    """Or gives the host's memory back then, if there is none."""
    with World(vram=4, host=8) as world:
        version = world.loader.publish("acme/a", 3)
        world.loader.publish("acme/b", 2)
        held = world.ready("acme/b")
        if room:
            held.release()
        lease = world.acquire("acme/a")
        with world.cache._lock:
            world.cache._stager.line_up(True)
        world.pool.run_all()
        assert lease.record.state is LeaseState.WAITING
        with world.cache._lock:
            world.cache._stager.line_up(False)
        world.cache.begin_step([]).end()
        assert lease.record.state is (LeaseState.COPYING if room else LeaseState.WAITING)
        world.cache._host.forget(version.resolved.key)
        assert world.host_free == (3 if room else 6), "who waits for VRAM holds no host memory"
        held.release()
        world.settle()
        assert lease.ready


def test_what_the_last_step_heard_of_is_placed_when_anybody_looks() -> None:
    with World() as world:
        world.loader.publish("acme/a", 3)
        lease = world.acquire("acme/a")
        world.cache._stager.line_up(True)
        world.pool.run_all()
        world.cache._stager.line_up(False)
        world.pump()
        assert lease.record.state is LeaseState.COPYING
        assert world.copied == 3


def test_room_that_a_lease_may_take_since_the_last_step_is_taken_when_anybody_looks() -> None:
    """It waited for room, then for a claim that trust had changed for; of that the last step hears."""
    with World(vram=4, host=8) as world:
        world.loader.publish("acme/a", 3), world.loader.publish("acme/b", 3)
        held, lease = world.ready("acme/b"), world.acquire("acme/a")
        world.settle()
        world.loader.trust_changes += 1
        held.release()
        world.cache._stager.line_up(True)
        world.pool.run_all()
        world.cache._stager.line_up(False)
        assert lease.record.state is LeaseState.WAITING
        world.pump()
        assert lease.record.state is LeaseState.COPYING
        world.settle()
        assert lease.ready


def test_a_step_that_is_interrupted_puts_nothing_off_for_ever() -> None:
    with World(host_kind=_Interrupted) as world:
        world.loader.publish("acme/a")
        lease = world.acquire("acme/a")
        ticket = world.cache.begin_step([])
        with pytest.raises(KeyboardInterrupt):
            ticket.end()
        world.pool.run_all()
        assert lease.record.state is LeaseState.COPYING


class _Interrupted(HostCache):
    """Ctrl-C comes while a step hears of answers."""

    def deliver(self, most: int | None = None) -> None:
        if most is not None:
            raise KeyboardInterrupt
        super().deliver(most)


def test_one_of_those_who_wait_looks_often_and_none_while_steps_run() -> None:
    with World() as world:
        cache = world.cache
        world.loader.publish("acme/a", 3)
        lease = world.acquire("acme/a")
        assert cache._patience() == WAIT_SECONDS
        world.pool.run_all()
        world.pump()
        assert cache._patience() == LOOK_SECONDS
        cache._looked_at = True
        assert cache._patience() == WAIT_COPY_SECONDS
        cache._looked_at = False
        ticket = cache.begin_step([])
        assert cache._patience() == WAIT_COPY_SECONDS
        ticket.end()
        assert cache._patience() == WAIT_COPY_SECONDS, "it has not executed"
        world.settle()
        assert lease.ready
        assert cache._patience() == WAIT_SECONDS
