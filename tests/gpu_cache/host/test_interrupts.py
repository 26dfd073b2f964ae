"""Ctrl-C in the thread that says the host's answers: it stops that thread, and no answer is lost with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from adapterd.gpu_cache.asking import Desk
from adapterd.gpu_cache.cpu_device import CpuDevice
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import Failure
from adapterd.gpu_cache.host.process.books import Books, Pending
from adapterd.gpu_cache.host.process.conversations import fail
from adapterd.gpu_cache.host.process.frames import FrameReader
from adapterd.gpu_cache.host.process.hearing import Hearing
from adapterd.gpu_cache.host.process.messages import Failed, Resolve, encode
from adapterd.gpu_cache.host.tier import PlainSlab
from adapterd.gpu_cache.slabs import SlabTensors
from adapterd.loader.errors import Code, reject
from adapterd.loader.identity import Ref
from contracts.host_user import SECONDS
from fakes.adapters import PAGE_BYTES, ManualPool, MemoryLoader

WRONG = Failure((reject(Code.NOT_FOUND, "acme/a", "there is none"),))
REFS = (Ref.parse("acme/a"),)


class Asker:
    """Who is interrupted the first time that it is told something."""

    def __init__(self, *, times: int = 1) -> None:
        self.heard: list[object] = []
        self.told = threading.Event()
        self._left = times

    def __call__(self, outcome: object) -> None:
        self._left -= 1
        if self._left >= 0:
            raise KeyboardInterrupt
        self.heard.append(outcome)
        self.told.set()


class Alone:
    """A host in this process; its jobs are run by hand."""

    def __init__(self, kind: type[HostCache] = HostCache) -> None:
        self.pool = ManualPool()
        loader = MemoryLoader()
        slab = PlainSlab(memoryview(bytearray(PAGE_BYTES)), PAGE_BYTES)
        self.host = kind(slab, loader.base, loader=loader, pool=self.pool)


class Asked(Alone):
    """By two, who are told that there is no such adapter; the first is interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Asker(), Asker(times=0)
        self.host.resolve(REFS, "acme", self.first)
        self.host.resolve(REFS, "acme", self.second)


def hear(hearing: Hearing, number: int) -> None:
    reader = FrameReader()
    for frame in reader.feed(encode(Failed(number, WRONG.problems))):
        hearing.take(frame)


def test_an_answer_of_the_loader_process_that_was_interrupted_is_asked_again() -> None:
    books, asker = Books(), Asker()
    hearing = Hearing(books, lambda: None)
    message = Resolve(7, "acme", REFS)
    books.ask(Pending(message, asker))
    with pytest.raises(KeyboardInterrupt):
        hear(hearing, 7)
    assert books.requests() == [message]
    hear(hearing, 7)
    assert (asker.heard, books.requests()) == ([WRONG], [])


@pytest.mark.parametrize("released", [False, True])
def test_what_was_held_is_asked_again_unless_it_was_given_back(released: bool) -> None:
    books, slab = Books(), object()
    pending = Pending(Resolve(7, "acme", REFS), Asker())
    books.ask(pending)
    assert books.answered(7, slab) is pending  # type: ignore[arg-type]
    if released:
        assert books.released(7, slab)  # type: ignore[arg-type]
    books.again(7, pending, holds=True)
    assert books.owed is not released
    assert len(books) == (not released)


def test_all_are_told_that_it_was_in_vain_though_one_was_interrupted() -> None:
    askers = [Asker(times=0), Asker(), Asker(times=0)]
    with pytest.raises(KeyboardInterrupt):
        fail([Pending(Resolve(n, "acme", REFS), asker) for n, asker in enumerate(askers)], WRONG.problems)
    assert [asker.heard for asker in askers] == [[WRONG], [], [WRONG]]


def test_an_answer_that_was_interrupted_in_this_process_is_said_again() -> None:
    world = Asked()
    with pytest.raises(KeyboardInterrupt):
        world.pool.run_all()
    world.pool.run_all()
    world.host.deliver()
    assert [len(asker.heard) for asker in (world.first, world.second)] == [1, 1]
    world.host.close(SECONDS)


def test_a_close_that_is_interrupted_closes_and_tells_the_others_all_the_same() -> None:
    world = Asked()
    with pytest.raises(KeyboardInterrupt):
        world.host.close(SECONDS)
    for asker in (world.first, world.second):
        assert asker.told.wait(SECONDS)
        (heard,) = asker.heard
        assert isinstance(heard, Failure)
        assert heard.problems[0].code is Code.CACHE_CLOSED
    world.pool.submit("acme", pytest.fail)
    assert not world.pool.busy


class Interrupted(HostCache):
    """Whoever asks for a version is interrupted when it was told."""

    def resolve(self, asked: Sequence[Ref], tenant: str, settle: Callable[[Any], None], **options: Any) -> int:
        left = [KeyboardInterrupt]

        def told(outcome: Any) -> None:
            settle(outcome)
            if left:
                raise left.pop()

        return super().resolve(asked, tenant, told, **options)


def test_the_cache_hears_once_what_an_interrupt_had_said_twice() -> None:
    world, heard = Alone(Interrupted), list[object]()
    slabs = SlabTensors(CpuDevice(), world.host.slab)
    desk = Desk(world.host, slabs, threading.Condition(), lambda: heard.append("after"))
    desk.resolve(REFS, "acme", lambda _ask, outcome: heard.append(outcome))
    with pytest.raises(KeyboardInterrupt):
        world.pool.run_all()
    world.host.deliver()
    assert [type(each) for each in heard] == [Failure, str]
    world.host.close(SECONDS)
