from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterd.gpu_cache.fences import OPEN, Fence
from adapterd.gpu_cache.pages import Allotment, PagePool, halved, runs
from contracts.pages import Mark, PagePoolMachine

TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_odd_page_does_not_break_a_pair_while_another_is_broken() -> None:
    pool = PagePool(8)
    assert pool.take(3, "acme").pages == (0, 1, 2)  # type: ignore[union-attr]
    assert pool.take(1, "acme").pages == (3,)  # type: ignore[union-attr]
    assert pool.take(4, "acme").pages == (4, 5, 6, 7)  # type: ignore[union-attr]


def test_pages_freed_longest_ago_come_first() -> None:
    pool = PagePool(4)
    first, second = pool.take(2, "acme"), pool.take(2, "acme")
    assert first is not None
    assert second is not None
    pool.give_back(second.pages, OPEN)
    pool.give_back(first.pages, OPEN)
    again = pool.take(2, "acme")
    assert again is not None
    assert again.pages == second.pages


def test_lone_pages_that_came_free_one_by_one_keep_their_own_marks_and_tenants() -> None:
    pool = PagePool(4)
    ones = [pool.take(1, tenant) for tenant in ("acme", "acme", "blue", "blue")]
    marks = [Fence((Mark(),)) for _ in range(2)]
    for one, fence in zip(ones[::2], marks, strict=True):
        assert one is not None
        pool.give_back(one.pages, fence)
    both = pool.take(2, "acme")
    assert both is not None
    assert both.pages == (0, 2)
    assert both.fence.events == (*marks[0].events, *marks[1].events)
    assert both.scrub == (2,)


def test_what_came_free_last_goes_from_hand_to_hand() -> None:
    pool = PagePool(7)
    kept, lent = pool.take(1, "acme"), pool.take(6, "acme")
    assert kept is not None
    assert lent is not None
    fence = Fence((Mark(),))
    for tenant, scrub in (("acme", ()), ("blue", lent.pages)):
        pool.give_back(lent.pages, fence)
        again = pool.take(6, tenant)
        assert again == Allotment(lent.pages, fence, scrub)
        assert pool.free == 0
    pool.give_back(lent.pages, fence)
    pool.give_back(kept.pages, OPEN)
    whole = pool.take(7, "blue")
    assert whole is not None
    assert sorted(whole.pages) == list(range(7))


def test_a_page_is_not_freed_twice() -> None:
    pool = PagePool(4)
    taken = pool.take(2, "acme")
    assert taken is not None
    pool.give_back(taken.pages, OPEN)
    with pytest.raises(AssertionError, match="free already"):
        pool.give_back(taken.pages, OPEN)


def test_fences_merge_without_repeats() -> None:
    a, b, c = Mark(), Mark(), Mark()
    assert Fence.merged([Fence((a, b)), OPEN, Fence((b, c))]).events == (a, b, c)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_runs_copy_exactly_the_pairs_of_pages(pairs: list[tuple[int, int]]) -> None:
    joined = runs([s for s, _ in pairs], [t for _, t in pairs])
    assert [(s + i, t + i) for s, t, length in joined for i in range(length)] == pairs


def test_neighbours_on_both_sides_are_one_run() -> None:
    assert runs([4, 5, 6, 9], [0, 1, 2, 3]) == [(4, 0, 3), (9, 3, 1)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
def test_halves_are_the_runs_of_the_first_pages_and_of_the_rest(lengths: list[int], data: st.DataObject) -> None:
    """Each run one page away from the last: none could be joined to another."""
    pages = [10 * i + page for i, length in enumerate(lengths) for page in range(length)]
    cut = data.draw(st.integers(0, len(pages)))
    first, rest = halved(runs(pages, pages), cut)
    assert first == runs(pages[:cut], pages[:cut])
    assert rest == runs(pages[cut:], pages[cut:])
