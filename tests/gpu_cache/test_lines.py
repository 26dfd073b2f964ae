from __future__ import annotations

import random
from dataclasses import dataclass

from adapterd.gpu_cache.lines import Lines


@dataclass(frozen=True)
class One:
    number: int
    tenant: str = "acme"
    priority: int = 0


def served(lines: Lines[One], able: object = None) -> list[int]:
    """Numbers in the order of their attempts; `able` are the tenants that are served, all if None."""
    order: list[int] = []

    def attempt(item: One) -> bool:
        order.append(item.number)
        return able is None or item.tenant in able  # type: ignore[operator]

    lines.serve(attempt)
    return order


def test_the_higher_priority_goes_first_then_the_older() -> None:
    lines: Lines[One] = Lines()
    for item in (One(3), One(1, "blue"), One(2, priority=-1), One(4, "core", priority=1), One(5, priority=1)):
        lines.add(item)
    assert served(lines) == [4, 5, 1, 3, 2]
    assert len(lines) == 0


def test_who_cannot_be_served_holds_up_those_behind_it_but_no_other_tenant() -> None:
    lines: Lines[One] = Lines()
    for item in (One(1), One(2), One(3, "blue"), One(4, "blue")):
        lines.add(item)
    assert served(lines, able={"blue"}) == [1, 3, 4]
    assert served(lines) == [1, 2]


def test_adding_is_idempotent_and_removing_is_too() -> None:
    lines: Lines[One] = Lines()
    item = One(1)
    lines.add(item)
    lines.add(item)
    assert len(lines) == 1
    lines.remove(item)
    lines.remove(item)
    assert served(lines) == []


def test_an_attempt_may_remove_and_add_others() -> None:
    lines: Lines[One] = Lines()
    items = [One(n) for n in range(6)]
    for item in items[:4]:
        lines.add(item)
    order: list[int] = []

    def attempt(item: One) -> bool:
        order.append(item.number)
        lines.remove(item)
        if item.number == 0:
            lines.remove(items[1])
            lines.add(items[5])
        return True

    lines.serve(attempt)
    assert order == [0, 2, 3, 5]


def test_a_pass_over_long_lines_makes_few_attempts() -> None:
    lines: Lines[One] = Lines()
    numbers = list(range(10_000))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        lines.add(One(number, f"t{number % 3}"))
    assert sorted(served(lines, able=set())) == [0, 1, 2]
