from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.daemon.feed import Cursor, ResidencyFeed
from adapterd.gpu_cache.daemon.messages import Gone, ResidencyAnswer
from fakes.served import Row, row

A, B = row("acme", "a"), row("blue", "b")


def cursor(answer: ResidencyAnswer) -> Cursor:
    return Cursor(answer.feed, answer.sequence)


def names(answer: ResidencyAnswer) -> list[str]:
    return [each.adapters[0] for each in answer.adapters]


def test_who_knows_nothing_gets_everything() -> None:
    feed = ResidencyFeed("f")
    feed.take([A, B])
    answer = feed.since(Cursor())
    assert (answer.complete, names(answer), answer.sequence) == (True, ["a", "b"], 2)


def test_who_knows_something_gets_what_changed() -> None:
    feed = ResidencyFeed("f")
    feed.take([A, B])
    first = feed.since(Cursor())
    assert not feed.news(cursor(first))
    feed.take([replace(A, generation=2)])
    answer = feed.since(cursor(first))
    assert (answer.complete, names(answer)) == (False, ["a"])
    assert answer.gone == (Gone(tenant="blue", digest=B.digest),)
    assert feed.since(cursor(answer)).adapters == ()


def test_what_came_back_is_not_gone() -> None:
    feed = ResidencyFeed("f")
    feed.take([A])
    first = feed.since(Cursor())
    feed.take([])
    feed.take([A])
    answer = feed.since(cursor(first))
    assert (names(answer), answer.gone) == (["a"], ())


def test_who_holds_an_adapter_is_no_change_and_absent_is_gone() -> None:
    feed = ResidencyFeed("f")
    feed.take([A])
    first = cursor(feed.since(Cursor()))
    feed.take([replace(A, leases=5, priority=3)])
    assert not feed.news(first)
    feed.take([replace(A, tier=Place.ABSENT)])
    assert len(feed.since(first).gone) == 1


def test_one_who_was_away_too_long_gets_everything() -> None:
    feed = ResidencyFeed("f", kept_gone=2)
    feed.take([A])
    first = cursor(feed.since(Cursor()))
    for number in range(3):
        feed.take([A, row("acme", str(number))])
    second = cursor(feed.since(Cursor()))
    assert not feed.since(first).complete
    for number in range(3, 5):
        feed.take([A, row("acme", str(number))])
    assert feed.since(first).complete
    assert not feed.since(second).complete


def test_a_cursor_of_another_run_or_of_the_future_is_worth_nothing() -> None:
    feed = ResidencyFeed("f")
    feed.take([A])
    for wrong in (Cursor("g", 1), Cursor("f", 2), Cursor("f", None), Cursor(None, 1)):
        assert feed.since(wrong).complete
        assert feed.news(wrong)


rows = st.lists(
    st.builds(
        row,
        st.sampled_from(["acme", "blue"]),
        st.sampled_from("abcd"),
        tier=st.sampled_from(Place),
        generation=st.integers(1, 2),
    ),
    max_size=6,
    unique_by=lambda each: (each.tenant, each.digest),
)


@given(st.lists(rows, max_size=20), st.data())
def test_whoever_follows_at_whatever_pace_knows_what_is_there(states: list[list[Row]], data: st.DataObject) -> None:
    feed, known, at = ResidencyFeed("f", kept_gone=2), dict[tuple[str, str], object](), Cursor()
    for state in states:
        feed.take(state)
        if data.draw(st.booleans()):
            answer = feed.since(at)
            assert answer.sequence >= (at.sequence or 0)
            at = cursor(answer)
            known = {} if answer.complete else known
            known |= {(each.tenant, each.digest): (each.tier, each.generation) for each in answer.adapters}
            for gone in answer.gone:
                known.pop((gone.tenant, gone.digest), None)
            assert known == {
                (each.tenant, each.digest): (each.tier, each.generation)
                for each in state
                if each.tier is not Place.ABSENT
            }
