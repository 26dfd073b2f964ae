"""The same work for every index, on a few threads."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from adapterd.loader.parallel import Helpers, default_threads, for_each


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_every_index_is_done_once(count: int, threads: int) -> None:
    done: list[int] = []
    for_each(count, done.append, threads)
    assert sorted(done) == list(range(count))


def test_so_many_run_at_once_and_no_more() -> None:
    together = threading.Barrier(3)
    running, most, lock = 0, 0, threading.Lock()

    def work(index: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(timeout=60)
        with lock:
            running -= 1

    for_each(12, work, 3)
    assert most == 3


def test_one_thread_is_the_callers() -> None:
    seen: set[int] = set()
    for_each(5, lambda _: seen.add(threading.get_ident()), 1)
    assert seen == {threading.get_ident()}


def test_after_a_failure_nothing_is_begun_and_the_lowest_one_is_told() -> None:
    begun: list[int] = []
    both = threading.Barrier(2)

    def work(index: int) -> None:
        begun.append(index)
        if index >= 2:
            both.wait(timeout=60)
            raise LookupError(str(index))

    with pytest.raises(LookupError, match="2"):
        for_each(100, work, 2)
    assert sorted(begun) == [0, 1, 2, 3]


def test_an_interrupt_is_raised_in_the_callers_thread() -> None:
    def work(index: int) -> None:
        if index == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        for_each(3, work, 2)


def test_by_default_there_is_one_a_processor_up_to_eight() -> None:
    assert 1 <= default_threads() <= 8


# --- threads that are kept


def crowd(threads: int, helpers: Helpers) -> set[int]:
    """Who worked at a call that `threads` have to come together for."""
    together, seen = threading.Barrier(threads), set[int]()

    def work(_: int) -> None:
        together.wait(timeout=60)
        seen.add(threading.get_ident())

    for_each(threads, work, threads, helpers)
    return seen


def test_helpers_are_kept_between_calls_and_end_when_closed() -> None:
    before = set(threading.enumerate())
    with Helpers(2) as helpers:
        assert set(threading.enumerate()) == before  # started when there is work
        first, second = crowd(3, helpers), crowd(3, helpers)
        assert first == second == {t.ident for t in set(threading.enumerate()) - before} | {threading.get_ident()}
    assert set(threading.enumerate()) == before


def test_no_more_come_than_there_are_or_were_asked_for() -> None:
    before = threading.active_count()
    with Helpers(5) as helpers:
        for_each(10, lambda _: None, 3, helpers)
        assert threading.active_count() == before + 2
        for_each(2, lambda _: None, 8, helpers)
        assert threading.active_count() == before + 2
    with Helpers(1) as helpers:
        done: list[int] = []
        for_each(20, done.append, 8, helpers)
        assert sorted(done) == list(range(20))
        assert threading.active_count() == before + 1


def test_once_they_are_closed_the_caller_works_alone() -> None:
    helpers = Helpers(3)
    crowd(4, helpers)
    helpers.close()
    helpers.close()
    seen: set[int] = set()
    for_each(9, lambda _: seen.add(threading.get_ident()), 4, helpers)
    assert seen == {threading.get_ident()}


def test_calls_share_them_and_a_busy_one_keeps_nobody_waiting() -> None:
    """The only helper is held up in one call; another one ends without it, and it is not let in afterwards."""
    entered, leave, late = threading.Event(), threading.Event(), list[int]()

    def hold(index: int) -> None:
        if threading.get_ident() != holder.ident:
            entered.set()
            assert leave.wait(60)
        else:
            assert entered.wait(60)

    with Helpers(1) as helpers:
        holder = threading.Thread(target=lambda: for_each(2, hold, 2, helpers))
        holder.start()
        assert entered.wait(60)
        for_each(5, lambda _: late.append(threading.get_ident()), 2, helpers)
        assert late == [threading.get_ident()] * 5
        leave.set()
        holder.join(60)
        assert len(crowd(2, helpers)) == 2
    assert late == [threading.get_ident()] * 5


def test_what_a_helper_raises_is_told_and_it_helps_again() -> None:
    with Helpers(1) as helpers:
        both = threading.Barrier(2)

        def work(index: int) -> None:
            both.wait(timeout=60)
            raise LookupError(str(index))

        with pytest.raises(LookupError, match="0"):
            for_each(9, work, 2, helpers)
        assert len(crowd(2, helpers)) == 2


def test_idle_helpers_hold_nothing_of_what_they_did() -> None:
    class Thing:
        def work(self, index: int) -> None:
            both.wait(timeout=60)
            raise LookupError(str(index))

    both = threading.Barrier(2)
    with Helpers(1) as helpers:
        thing = Thing()
        gone = weakref.ref(thing)
        with pytest.raises(LookupError):
            for_each(2, thing.work, 2, helpers)
        del thing
        deadline = time.monotonic() + 60
        while gone() is not None:  # until the helper has come back for more
            gc.collect()
            assert time.monotonic() < deadline


def test_what_was_begun_has_ended_when_a_call_returns() -> None:
    both, ended = threading.Barrier(2), list[int]()

    def work(index: int) -> None:
        both.wait(timeout=60)
        if threading.get_ident() != mine:
            sum(range(1_000_000))
        ended.append(index)

    mine = threading.get_ident()
    with Helpers(1) as helpers:
        for_each(2, work, 2, helpers)
        assert sorted(ended) == [0, 1]


@pytest.mark.parametrize("kept", [False, True])
def test_where_the_system_gives_no_thread_the_caller_works_alone(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what did not start is neither counted on nor waited for."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Helpers(2) as helpers:
        monkeypatch.setattr(threading.Thread, "start", refused)
        seen: list[int] = []
        for_each(5, lambda _: seen.append(threading.get_ident()), 3, helpers if kept else None)
        assert seen == [threading.get_ident()] * 5
        monkeypatch.setattr(threading.Thread, "start", start)
        assert len(crowd(3, helpers)) == 3


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_failed_call_was_about_goes_with_its_exception(threads: int) -> None:
    """At once: what a traceback refers to may be memory that somebody wants to give back."""

    class Big:
        """What stands for it."""

    gone: list[weakref.ref[Big]] = []

    def work(index: int) -> None:
        big = Big()
        gone.append(weakref.ref(big))
        raise LookupError(index)

    gc.disable()
    try:
        with Helpers(2) as helpers:
            with pytest.raises(LookupError) as failed:
                for_each(3, work, threads, helpers)
            del failed
        assert gone
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()
