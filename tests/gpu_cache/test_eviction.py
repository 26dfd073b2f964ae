"""A policy of somebody else's: whatever it does, leases get what they would get without it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import cycle

import pytest

from adapterd.gpu_cache.eviction import Candidate, GuardedPolicy, LeastRecentlyUsed
from adapterd.gpu_cache.records import Cause
from adapterd.loader.identity import VersionKey
from fakes.adapters import make_base
from fakes.cache_world import World

PIN = make_base().pin
OTHER = Candidate(VersionKey("blue", PIN, "held"), 2, 0)


class By:
    """Orders as it is told."""

    def __init__(self, how: Callable[[Sequence[Candidate]], object]) -> None:
        self._how = how

    def order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return self._how(candidates)  # type: ignore[return-value]


def raises(_: Sequence[Candidate]) -> object:
    raise ZeroDivisionError("a bug of the policy's")


def breaks_off(candidates: Sequence[Candidate]) -> object:
    yield from candidates[:1]
    raise RuntimeError("in the middle")


def exits(_: Sequence[Candidate]) -> object:
    raise SystemExit(3)


def newest_first(candidates: Sequence[Candidate]) -> object:
    return sorted(candidates, key=lambda c: -c.last_used)


def empties(candidates: Sequence[Candidate]) -> object:
    candidates.clear()  # type: ignore[attr-defined]
    return candidates


FAULTS = [
    raises,
    breaks_off,
    exits,
    empties,
    lambda _: None,
    lambda _: [],
    lambda found: found[:-1],
    lambda found: [None, *found],
    lambda found: [OTHER, *found],
    lambda found: [OTHER, *found[1:]],
    lambda found: [found[0], *found],
    lambda found: [found[0]] * len(found),
    lambda found: [each._replace(pages=99) for each in found],
    cycle,
]


def filled(world: World) -> None:
    """`acme/a` and `acme/b` fill VRAM; the first has not been used for longer."""
    for name in ("acme/a", "acme/b", "blue/c"):
        world.loader.publish(name, 2)
    world.ready("acme/a").release()
    world.ready("acme/b").release()


@pytest.mark.parametrize("how", FAULTS)
def test_where_a_policy_fails_the_least_recently_used_goes_and_it_is_counted(
    how: Callable[[Sequence[Candidate]], object],
) -> None:
    with World(vram=4, host=4, policy=By(how)) as world:
        filled(world)
        assert world.ready("blue/c").ready
        found = world.cache.statistics()
        assert found.policy_faults == 2  # once in VRAM, once in host memory
        assert found.evictions[Cause.ROOM] == 1
        hits = found.hits
        assert world.ready("acme/b").ready
        assert world.cache.statistics().hits == hits + 1


def test_a_policys_own_order_is_taken() -> None:
    with World(vram=4, policy=By(newest_first)) as world:
        filled(world)
        assert world.ready("blue/c").ready
        hits = world.cache.statistics().hits
        assert world.ready("acme/a").ready
        assert (world.cache.statistics().hits, world.cache.statistics().policy_faults) == (hits + 1, 0)


def test_a_policy_that_fails_breaks_no_lease_that_is_held_or_comes_back() -> None:
    """The lease that comes back makes room for one that waits: the policy is asked inside its release."""
    with World(vram=4, policy=By(raises)) as world:
        filled(world)
        held, back = world.ready("acme/a"), world.ready("acme/b")
        waiting = world.acquire("blue/c")
        world.settle()
        assert not waiting.ready
        back.release()
        world.settle()
        assert waiting.ready
        world.step(held, waiting)
        world.settle()
        assert (held.ready, world.violations, world.cache.statistics().policy_faults) == (True, [], 1)


def test_the_log_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    guarded = GuardedPolicy.of(By(raises))
    candidates = [Candidate(VersionKey("acme", PIN, name), 1, tick) for name, tick in (("new", 9), ("old", 1))]
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert [c.key.digest for c in guarded.order(candidates)] == ["old", "new"]
    (told,) = caplog.records
    assert "By" in told.getMessage()
    assert told.exc_info is not None
    assert told.exc_info[0] is ZeroDivisionError
    assert guarded.faults == 3


def test_who_waits_for_room_is_served_after_an_interrupt_of_that() -> None:
    left = [KeyboardInterrupt]

    def interrupted(candidates: Sequence[Candidate]) -> object:
        if left:
            raise left.pop()
        return newest_first(candidates)

    with World(vram=4, policy=By(interrupted)) as world:
        filled(world)
        lease = world.acquire("blue/c")
        with pytest.raises(KeyboardInterrupt):
            world.settle()
        world.settle()
        assert lease.ready
        assert world.cache.statistics().policy_faults == 0


def test_an_interrupt_is_no_fault() -> None:
    def interrupted(_: Sequence[Candidate]) -> object:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedPolicy.of(By(interrupted)).order([OTHER])


def test_a_policy_is_guarded_once() -> None:
    guarded = GuardedPolicy.of(LeastRecentlyUsed())
    assert GuardedPolicy.of(guarded) is guarded
    assert GuardedPolicy.of(None).order([OTHER]) == [OTHER]
