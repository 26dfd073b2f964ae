"""Who takes what the loader says: the reader while nothing else goes on, a step behind its launch while steps do."""

from __future__ import annotations

import threading

import pytest

from adapterd.gpu_cache.host.process.frames import Frame, Garbled
from adapterd.gpu_cache.host.process.inbox import PATIENCE_SECONDS, Inbox
from fakes.devices import Barrier

FACTS, ANSWER, GARBAGE = Frame(b"facts"), Frame(b"answer"), Frame(b"garbage")
INTERRUPT = Frame(b"interrupt")


class World:
    """An inbox, a clock, and what was taken."""

    def __init__(self, barrier: Barrier | None = None) -> None:
        self.now, self.woken, self.barrier = 50.0, 0, barrier
        self.taken: list[bytes] = []
        self.inbox = Inbox(self._take, self._wake, lambda: self.now)

    def _take(self, frame: Frame) -> bool:
        if frame is GARBAGE:
            raise Garbled("no message")
        if frame is INTERRUPT:
            raise KeyboardInterrupt
        if self.barrier is not None:
            self.barrier.stop()
        self.taken.append(frame.head)
        return frame is ANSWER

    def _wake(self) -> None:
        self.woken += 1

    def put(self, *frames: Frame) -> None:
        for frame in frames:
            self.inbox.put(frame)


def test_while_no_steps_go_on_the_reader_takes_everything_at_once() -> None:
    world = World()
    world.put(FACTS, ANSWER, ANSWER)
    assert world.inbox.left() == 0
    world.inbox.read()
    assert world.taken == [b"facts", b"answer", b"answer"]
    assert world.inbox.left() is None


def test_while_steps_go_on_each_takes_one_answer_and_what_comes_before_it() -> None:
    world = World()
    world.inbox.deliver(1)
    world.put(FACTS, ANSWER, FACTS, ANSWER)
    world.inbox.read()
    assert world.taken == []
    world.inbox.deliver(1)
    assert world.taken == [b"facts", b"answer"]
    world.inbox.read()
    world.inbox.deliver(1)
    assert world.taken == [b"facts", b"answer"] * 2


def test_what_waits_too_long_for_a_step_the_reader_takes() -> None:
    world = World()
    world.inbox.deliver(1)
    world.put(ANSWER)
    world.now += 0.75 * PATIENCE_SECONDS
    world.put(ANSWER)
    world.inbox.read()
    assert world.inbox.left() == pytest.approx(0.25 * PATIENCE_SECONDS)
    world.now += 0.5 * PATIENCE_SECONDS
    assert world.inbox.left() == 0
    world.inbox.read()
    assert world.taken == [b"answer"]
    world.now += PATIENCE_SECONDS
    world.inbox.read()
    assert world.taken == [b"answer"] * 2


def test_steps_that_ended_long_ago_count_no_more() -> None:
    world = World()
    world.inbox.deliver(1)
    world.now += PATIENCE_SECONDS
    world.put(ANSWER)
    world.inbox.read()
    assert world.taken == [b"answer"]


def test_who_runs_no_step_leaves_to_steps_what_is_theirs() -> None:
    world = World()
    world.inbox.deliver(1)
    world.put(ANSWER, ANSWER)
    world.inbox.deliver(None)
    assert world.taken == []
    world.now += 1.5 * PATIENCE_SECONDS
    world.inbox.deliver(None)
    assert world.taken == [b"answer"] * 2
    world.put(ANSWER)
    world.inbox.deliver(None)
    assert world.taken == [b"answer"] * 3


def test_what_a_step_cannot_take_is_the_readers_to_hear() -> None:
    world = World()
    world.inbox.deliver(1)
    world.put(GARBAGE, ANSWER)
    world.inbox.deliver(1)
    assert world.woken == 1
    with pytest.raises(Garbled):
        world.inbox.read()
    world.inbox.clear()
    world.inbox.read()
    assert world.taken == []


def test_behind_what_could_not_be_taken_no_step_takes_anything() -> None:
    world = World()
    world.inbox.deliver(1)
    world.put(GARBAGE, ANSWER)
    world.inbox.deliver(1)
    world.inbox.deliver(1)
    assert world.taken == []
    with pytest.raises(Garbled):
        world.inbox.read()


def test_an_interrupt_is_its_threads_own_and_the_reader_begins_again() -> None:
    """Ctrl-C comes to the serving thread, whatever it is at; what it had half taken is asked for once more."""
    world = World()
    world.inbox.deliver(1)
    world.put(INTERRUPT, ANSWER)
    with pytest.raises(KeyboardInterrupt):
        world.inbox.deliver(1)
    assert world.woken == 1
    with pytest.raises(EOFError):
        world.inbox.read()


def test_when_the_loader_has_gone_nothing_of_what_it_said_is_left_to_a_step() -> None:
    world = World()
    world.inbox.deliver(1)
    world.put(FACTS, ANSWER, FACTS, ANSWER, FACTS)
    world.inbox.read(last=True)
    assert world.taken == [b"facts", b"answer"] * 2 + [b"facts"]


def test_another_loader_is_not_blamed_for_what_the_last_one_said() -> None:
    world = World()
    world.inbox.deliver(1)
    world.put(GARBAGE)
    world.inbox.deliver(1)
    world.inbox.clear()
    world.inbox.read()


def test_a_step_does_not_wait_for_the_reader() -> None:
    barrier = Barrier()
    world = World(barrier)
    world.put(ANSWER, ANSWER)
    reader = threading.Thread(target=world.inbox.read)
    reader.start()
    barrier.await_arrival()
    world.inbox.deliver(1)
    assert world.taken == []
    barrier.open()
    reader.join(20)
    world.inbox.deliver(1)
    assert world.taken == [b"answer"] * 2
