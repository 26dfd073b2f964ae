"""What is kept in memory is bounded, and the latest of it."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from adapterd.loader.recent import Recent


def test_what_was_kept_is_found_and_nothing_else() -> None:
    recent: Recent[str, list[int]] = Recent(10)
    value = [1]
    recent.keep("a", value, 3)
    assert recent.get("a") is value
    assert recent.get("b") is None


def test_what_was_asked_for_longest_ago_goes_first() -> None:
    recent: Recent[str, str] = Recent(3)
    for name in "abc":
        recent.keep(name, name, 1)
    assert recent.get("a") == "a"
    recent.keep("d", "d", 1)
    assert [recent.get(name) for name in "abcd"] == ["a", None, "c", "d"]


def test_a_heavy_one_takes_the_place_of_several_and_one_too_heavy_that_of_none() -> None:
    recent: Recent[str, str] = Recent(4)
    for name in "abcd":
        recent.keep(name, name, 1)
    recent.keep("whale", "whale", 5)
    assert [recent.get(name) for name in ("a", "whale")] == ["a", None]
    recent.keep("seal", "seal", 3)
    assert [recent.get(name) for name in ("a", "b", "c", "d", "seal")] == ["a", None, None, None, "seal"]


def test_a_key_keeps_its_first_value_and_is_weighed_once() -> None:
    recent: Recent[str, str] = Recent(4)
    for value in ("one", "two"):
        recent.keep("a", value, 3)
    assert (recent.get("a"), recent.weight) == ("one", 3)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=60))
def test_all_together_never_weigh_more_than_they_may(kept: list[tuple[int, int]]) -> None:
    recent: Recent[int, int] = Recent(10)
    for key, weight in kept:
        recent.keep(key, weight, weight)
        assert recent.weight == sum(found for n in range(10) if (found := recent.get(n)) is not None) <= 10


def test_threads_share_one() -> None:
    recent: Recent[int, int] = Recent(50)
    wrong: list[int] = []

    def work(first: int) -> None:
        for step in range(2000):
            key = (first + step) % 97
            found = recent.get(key)
            if found is None:
                recent.keep(key, key, 1)
            elif found != key:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(17 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert recent.weight == 50
