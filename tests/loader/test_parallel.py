"""The same work for every index, on a few threads."""

from __future__ import annotations

import threading

import pytest

from adapterd.loader.parallel import default_threads, for_each


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
