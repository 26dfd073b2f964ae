"""Turns: an owner that floods lengthens nobody's line but its own, whoever comes, goes or gives up meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.loader.errors import Code, Unavailable
from adapterd.registry.turns import Places, Turns


async def settled() -> None:
    """Until nobody has anything to do but wait."""
    for _ in range(5):
        await asyncio.sleep(0)


class Hall:
    """People who ask for turns, and the order in which they are served."""

    def __init__(self, places: Places) -> None:
        self.turns = Turns(places)
        self.served: list[str] = []
        self.asking: set[asyncio.Task[None]] = set()

    async def ask(self, owner: str, count: int = 1) -> None:
        for _ in range(count):
            self.asking.add(asyncio.create_task(self._ask(owner)))
        await settled()

    async def leave(self, owner: str) -> None:
        self.turns.leave(owner)
        await settled()

    async def _ask(self, owner: str) -> None:
        await self.turns.enter(owner)
        self.served.append(owner)


def run(play: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await play()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    asyncio.run(whole())


def test_behind_a_flood_the_other_owner_is_next() -> None:
    async def play() -> None:
        hall = Hall(Places(at_once=1, each=1, waiting=1000))
        await hall.ask("flood", 500)
        await hall.ask("other", 2)
        assert hall.served == ["flood"]
        for owner in ("flood", "flood", "other"):
            await hall.leave(owner)
        assert hall.served == ["flood", "flood", "other", "flood"]

    run(play)


def test_one_owner_never_has_all_places() -> None:
    async def play() -> None:
        hall = Hall(Places(at_once=4, each=3, waiting=1000))
        await hall.ask("flood", 500)
        assert hall.served == 3 * ["flood"]
        await hall.ask("other")
        assert hall.served[3:] == ["other"], "it does not wait at all"

    run(play)


def test_owners_that_wait_are_served_in_rotation() -> None:
    async def play() -> None:
        hall = Hall(Places(at_once=1, each=1, waiting=1000))
        await hall.ask("a", 4)
        await hall.ask("b", 3)
        await hall.ask("c", 1)
        for _ in range(7):
            await hall.leave(hall.served[-1])
        assert "".join(hall.served) == "aabcabab"

    run(play)


def test_a_line_ends_somewhere_and_the_others_do_not_notice() -> None:
    async def play() -> None:
        hall = Hall(Places(at_once=1, each=1, waiting=3))
        await hall.ask("flood", 4)
        with pytest.raises(Unavailable) as told:
            await hall.turns.enter("flood")
        assert told.value.code is Code.QUEUE_FULL
        await hall.ask("other")
        assert (hall.turns.waiting("flood"), hall.turns.waiting("other")) == (3, 1)

    run(play)


def test_who_gives_up_at_the_moment_of_the_turn_hands_it_on() -> None:
    async def play() -> None:
        turns = Turns(Places(at_once=1, each=1, waiting=3))
        await turns.enter("a")
        gives_up, waits = asyncio.create_task(turns.enter("a")), asyncio.create_task(turns.enter("b"))
        await settled()
        turns.leave("a")  # the first in line has it now, but has not heard of it
        gives_up.cancel()
        await asyncio.wait_for(waits, 5)

    run(play)


MOVES = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ask", "ask", "leave", "give up"])), max_size=60)


@given(MOVES, st.integers(1, 4), st.integers(1, 4))
def test_no_place_is_lost_and_none_is_given_twice(moves: list[tuple[str, str]], at_once: int, each: int) -> None:
    async def play() -> None:
        turns = Turns(Places(at_once, each, 1000))
        inside: Counter[str] = Counter()
        tasks: dict[str, list[asyncio.Task[None]]] = {"a": [], "b": [], "c": []}

        async def enter(owner: str) -> None:
            await turns.enter(owner)
            inside[owner] += 1
            assert inside.total() <= at_once and inside[owner] <= each

        for owner, move in moves:
            if move == "ask":
                tasks[owner].append(asyncio.create_task(enter(owner)))
            elif move == "leave" and inside[owner]:
                inside[owner] -= 1
                turns.leave(owner)
            elif move == "give up" and (waiting := [task for task in tasks[owner] if not task.done()]):
                waiting[0].cancel()
            if move != "give up":  # so that some give up at the very moment of their turn
                await settled()
        await settled()
        while inside.total():
            owner = next(iter(+inside))
            inside[owner] -= 1
            turns.leave(owner)
            await settled()
        every = [task for of in tasks.values() for task in of]
        assert all(task.done() for task in every), "who did not give up was served"
        assert [t.exception() for t in every if not t.cancelled() and t.exception()] == []

    run(play)
