"""The link's turns: page by page among tenants, in order within one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from adapterd.gpu_cache.copy_turns import CopyTurns


@dataclass(eq=False)
class Item:
    tenant: str
    pages: int


def drawn(turns: CopyTurns[Item], budget: int) -> list[tuple[Item, int]]:
    """Pieces, as a queue takes them, until the budget is spent or nothing is left."""
    taken = []
    while budget > 0 and (item := turns.next()) is not None:
        piece = min(item.pages, turns.piece(budget))
        turns.given(item, piece)
        item.pages -= piece
        budget -= piece
        taken.append((item, piece))
        if not item.pages:
            turns.remove(item)
    return taken


@given(
    queued=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=20),
    budgets=st.lists(st.integers(1, 8), min_size=1, max_size=60),
)
def test_who_waits_all_the_time_gets_an_equal_share(queued: list[tuple[str, int]], budgets: list[int]) -> None:
    turns: CopyTurns[Item] = CopyTurns()
    items = [Item(*each) for each in queued]
    for item in items:
        turns.add(item)
    given_to: Counter[str] = Counter()
    order: dict[str, list[Item]] = {}
    for budget in budgets:
        waiting = {item.tenant for item in turns}
        for item, piece in drawn(turns, budget):
            given_to[item.tenant] += piece
            order.setdefault(item.tenant, []).append(item)
        still = waiting & {item.tenant for item in turns}
        shares = [given_to[tenant] for tenant in still]
        assert max(shares, default=0) - min(shares, default=0) <= 8, "a piece is a step's pages at most"
    for tenant, seen in order.items():
        assert seen == sorted(seen, key=[i for i in items if i.tenant == tenant].index), "first in, first out"


def test_who_was_away_is_not_paid_for_it() -> None:
    turns: CopyTurns[Item] = CopyTurns()
    turns.add(Item("a", 100))
    drawn(turns, 50)
    late = Item("b", 4)
    turns.add(late)
    taken = drawn(turns, 8)
    assert sum(piece for item, piece in taken if item is late) == 4
    assert len(turns) == 1


def test_when_nothing_is_queued_nobody_owes_anything() -> None:
    turns: CopyTurns[Item] = CopyTurns()
    turns.add(Item("a", 10))
    drawn(turns, 10)
    turns.add(Item("a", 4))
    turns.add(Item("b", 4))
    assert Counter(item.tenant for item, pages in drawn(turns, 4) for _ in range(pages)) == {"a": 2, "b": 2}
