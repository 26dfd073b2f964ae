"""Of the threads that wait for copies one looks often, and whoever looks next is told right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adapterd.gpu_cache import LeaseState
from adapterd.gpu_cache.waiting import LOOK_SECONDS, OVERSLEPT_SECONDS, WAIT_COPY_SECONDS, WAIT_SECONDS
from fakes.adapters import PAGE_BYTES
from fakes.cache_world import World

Waits = list[tuple[float, bool]]
"""(seconds, whether anybody looked often meanwhile) of each wait."""


class Busy:
    """A cache whose waits end at once and are written down."""

    def __init__(self, world: World) -> None:
        self.cache: Any = world.cache
        self.waits: Waits = []
        self.raises: type[BaseException] | None = None
        self.cache._lock.wait = self._wait

    def _wait(self, seconds: float) -> None:
        self.waits.append((seconds, self.cache._looked_at))
        if self.raises is not None:
            raise self.raises


@pytest.fixture
def world() -> Iterator[World]:
    with World() as world:
        yield world


@pytest.fixture
def busy(world: World) -> Busy:
    """A copy is under way, and no step."""
    world.loader.publish("acme/a", 2)
    world.acquire("acme/a")
    world.pool.run_all()
    world.pump()
    busy = Busy(world)
    assert busy.cache._copies.busy
    return busy


def test_the_first_looks_often_and_leaves_that_to_the_next(busy: Busy) -> None:
    for _ in range(2):
        busy.cache._wait(1.0)
        assert not busy.cache._looked_at
    assert busy.waits == [(LOOK_SECONDS, True)] * 2


def test_as_long_as_a_copy_cannot_have_landed_it_sleeps(busy: Busy) -> None:
    copies = busy.cache._copies
    now = copies._flying[0].begun
    copies._clock = lambda: now
    copies._pace = 0.001 / (2 * PAGE_BYTES)
    for left in (0.001, 0.0005, 0.0001, 0.0):
        now = copies._flying[0].begun + 0.001 - left
        busy.cache._wait(1.0)
    copies._pace = 1.0
    busy.cache._wait(1.0)
    assert [seconds for seconds, _ in busy.waits] == [
        pytest.approx(0.0005 - OVERSLEPT_SECONDS),
        pytest.approx(0.00025 - OVERSLEPT_SECONDS),
        pytest.approx(0.0001 - OVERSLEPT_SECONDS),
        LOOK_SECONDS,
        WAIT_SECONDS,
    ]


def test_one_that_was_noticed_late_does_not_hold_up_those_behind_it(world: World) -> None:
    cache: Any = world.cache
    copies, seconds, now, taken = cache._copies, 0.0002, 100.0, []
    copies._clock = lambda: now

    def wait(asked: float) -> None:
        nonlocal now
        now += asked + OVERSLEPT_SECONDS
        if now - copies._flying[0].begun >= seconds:
            world.device.drain()

    cache._lock.wait = wait
    for late in [0.02] + 11 * [0.0]:
        version = world.loader.publish("acme/a", 2)
        lease = world.acquire(version.pinned)
        world.pool.run_all()
        world.pump()
        begun, now = now, now + late
        while not lease.ready:
            cache._wait(1.0)
            world.pump()
        lease.release()
        taken.append(now - begun)
    assert taken[0] > 0.02
    assert taken == sorted(taken, reverse=True) and taken[-1] < 2 * seconds


def test_beside_one_who_looks_often_another_need_not(busy: Busy) -> None:
    busy.cache._looked_at = True
    busy.cache._wait(1.0)
    assert busy.waits == [(WAIT_COPY_SECONDS, True)]
    assert busy.cache._looked_at, "the one who does goes on"


def test_one_who_is_interrupted_looks_no_more(busy: Busy) -> None:
    busy.raises = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        busy.cache._wait(1.0)
    assert not busy.cache._looked_at


def test_without_copies_nobody_looks_often(world: World) -> None:
    idle = Busy(world)
    idle.cache._wait(1.0)
    idle.cache._wait(WAIT_SECONDS / 2)
    assert idle.waits == [(WAIT_SECONDS, False), (WAIT_SECONDS / 2, False)]
    assert not idle.cache._looked_at


def test_who_waits_hears_of_what_a_step_has_heard(world: World) -> None:
    """It may have been the last one: nobody else looks then."""
    cache: Any = world.cache
    woken = 0

    def notify_all() -> None:
        nonlocal woken
        woken += 1

    world.loader.publish("acme/a", 2)
    lease = world.acquire("acme/a")
    cache._lock.notify_all = notify_all
    cache._stager.line_up(True)
    world.pool.run_all()
    cache._stager.line_up(False)
    assert woken > 0 and lease.record.state is LeaseState.WAITING
    world.pump()
    assert lease.record.state is LeaseState.COPYING
