"""The thread that listens to a registry's changes: order, failures, cursors."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from adapterd.gpu_cache.events import (
    IDLE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    AliasMoved,
    Changes,
    Event,
    EventFollower,
    Quarantined,
)
from adapterd.loader.errors import Code, error
from fakes.cache_world import World
from fakes.devices import Barrier

EVENTS = [AliasMoved("acme", "a", str(number)) for number in range(5)]


@dataclass
class FakeFeed:
    """EventSource over a list. `fails` is what the next answers are instead."""

    events: list[Event] = field(default_factory=list)
    most: int = 2
    fails: list[Exception] = field(default_factory=list)
    asked: list[str | None] = field(default_factory=list)
    barrier: Barrier | None = None

    def changes(self, since: str | None) -> Changes:
        self.asked.append(since)
        if self.barrier is not None:
            self.barrier.stop()
        if self.fails:
            raise self.fails.pop(0)
        begin = int(since or 0)
        found = tuple(self.events[begin : begin + self.most])
        return Changes(found, str(begin + len(found)))


def down() -> Exception:
    return error(Code.SERVER_UNREACHABLE, "registry", "no answer")


def test_events_come_once_and_in_order() -> None:
    heard: list[Event] = []
    feed = FakeFeed(list(EVENTS))
    follower = EventFollower(feed, heard.append)
    assert [follower.poll() for _ in range(4)] == [0.0, 0.0, 0.0, IDLE_SECONDS]
    assert heard == EVENTS
    assert feed.asked == [None, "2", "4", "5"]
    again = EventFollower(feed, heard.append, cursor=follower.cursor)
    again.poll()
    assert heard == EVENTS


def test_a_source_that_fails_is_asked_less_and_less_with_the_same_cursor() -> None:
    now = [5.0]
    heard: list[Event] = []
    feed = FakeFeed(list(EVENTS), fails=[down() for _ in range(20)])
    follower = EventFollower(feed, heard.append, cursor="1", clock=lambda: now[0])
    pauses = [follower.poll() for _ in range(20)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    assert follower.problem is not None
    assert follower.problem.code is Code.SERVER_UNREACHABLE
    assert set(feed.asked) == {"1"}
    now[0] = 9.0
    assert follower.poll() == 0.0
    assert (follower.problem, follower.heard_at, heard) == (None, 9.0, EVENTS[1:3])
    feed.fails.append(down())
    assert follower.poll() == 0.5


@pytest.mark.parametrize("failure", [down(), ZeroDivisionError()])
def test_an_event_that_could_not_be_heeded_comes_again(failure: Exception) -> None:
    heard: list[Event] = []
    failures = [failure]

    def heed(event: Event) -> None:
        if event is EVENTS[1] and failures:
            raise failures.pop()
        heard.append(event)

    follower = EventFollower(FakeFeed(list(EVENTS)), heed)
    assert follower.poll() > 0
    assert follower.cursor is None
    follower.poll()
    assert heard == [EVENTS[0], EVENTS[0], EVENTS[1]]


def test_the_thread_waits_as_it_is_told_and_ends() -> None:
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 5

    heard: list[Event] = []
    follower = EventFollower(FakeFeed(list(EVENTS), fails=[down()]), heard.append, wait=wait)
    follower.run()
    assert waits == [0.5, 0.0, 0.0, 0.0, IDLE_SECONDS]
    assert heard == EVENTS


def test_a_source_that_holds_its_answer_back_does_not_hold_up_the_end() -> None:
    before = set(threading.enumerate())
    barrier = Barrier()
    heard: list[Event] = []
    with EventFollower(FakeFeed(list(EVENTS), barrier=barrier), heard.append):
        barrier.await_arrival()
    barrier.open()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert heard == []


def test_a_cache_heeds_what_a_feed_says() -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        follower = EventFollower(FakeFeed([Quarantined("acme", "a", 1, version.digest, "copied")]), world.cache.heed)
        follower.poll()
        assert lease.problem is not None
        assert lease.problem.code is Code.VERSION_REVOKED
        assert "copied" in lease.problem.message
