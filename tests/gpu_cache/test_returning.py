"""What is asked for again after it has left VRAM: read once, and decided anew each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from adapterd.gpu_cache import LeaseState
from adapterd.gpu_cache.eviction import Candidate
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import AtHand
from adapterd.gpu_cache.revocation import Revocation
from adapterd.loader.errors import Code
from fakes.adapters import PAGE_BYTES, Published
from fakes.at_hand import in_host_memory, second_cache, state
from fakes.cache_world import World


def again_in_host_memory(world: World, **published: object) -> Published:
    """Asked for before, understood, and in VRAM no more."""
    version = in_host_memory(world, "acme/a", **published)
    for _ in range(2):
        world.ready(version.pinned).release()
        with world.cache._lock:
            world.cache._stager.shelf.evict(world.cache._stager.entries[version.resolved.key])
    world.device.drain()
    world.loader.calls.clear()
    return version


def test_a_wish_is_read_and_put_together_once() -> None:
    with World() as world:
        version = again_in_host_memory(world)
        meaning = world.cache._seen.meaning("acme", version.pinned, world.cache.base.pin)
        assert meaning is not None
        lease = world.acquire(version.pinned)
        assert state(lease) is LeaseState.COPYING
        assert lease.record.asked is meaning.asked
        assert lease.record.components is meaning.components
        world.settle()
        world.step(lease)
        world.settle()
        assert (lease.ready, world.violations) == (True, [])
        assert world.cache._seen.meaning("blue", version.pinned, world.cache.base.pin) is None
        assert world.failure(version.pinned, "blue") is Code.NOT_FOUND


def test_what_is_known_of_it_is_not_noted_again() -> None:
    with World() as world:
        version = again_in_host_memory(world)
        (before,) = world.cache._stager.remembered._found[version.resolved.key].verified.values()
        lease = world.acquire(version.pinned)
        (entry,) = lease.record.entries
        assert state(lease) is LeaseState.COPYING
        assert [*entry.verified.values()] == [before]
        assert next(iter(entry.verified.values())) is before


def _forgotten(world: World, version: Published) -> None:
    world.cache._host.forget(version.resolved.key)


def _distrusted(world: World, _: Published) -> None:
    world.loader.trust_changes += 1


def _reloaded(world: World, _: Published) -> None:
    world.cache.rebind(world.loader.base)


def _revoked(world: World, version: Published) -> None:
    world.cache.revoke(Revocation("acme", digest=version.digest))


def _key_revoked(world: World, _: Published) -> None:
    world.cache.revoke(Revocation("acme", key_id="k1"))


def _drained(world: World, _: Published) -> None:
    world.cache.drain(True)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_forgotten, None), (_distrusted, None), (_reloaded, None), (_revoked, Code.VERSION_REVOKED),
        (_key_revoked, Code.VERSION_REVOKED), (_drained, Code.CACHE_DRAINING),
    ],
)  # fmt: skip
def test_what_a_wish_meant_says_nothing_about_whether_it_may_be_had(
    change: Callable[[World, Published], None], code: Code | None
) -> None:
    with World() as world:
        version = again_in_host_memory(world, publisher="k1")
        change(world, version)
        before = world.copied
        lease = world.acquire(version.pinned)
        assert world.copied == before, "nothing is copied before it is looked at again"
        world.settle()
        assert (lease.problem and lease.problem.code) == code
        assert lease.ready == (code is None)


@pytest.mark.parametrize("settings", [{"vram_bytes": PAGE_BYTES}, {"max_composition_rank": 1}])
def test_what_can_never_be_served_fails_at_once_each_time(settings: dict[str, Any]) -> None:
    with World() as world:
        version = in_host_memory(world, "acme/a")
        with second_cache(world, **settings) as small:
            for _ in range(3):
                lease = small.acquire(version.pinned, tenant="acme")
                assert lease.problem is not None
                assert lease.problem.code in {Code.BUDGET_EXCEEDED, Code.COMPOSITION_INVALID}
            assert small._seen.meaning("acme", version.pinned, world.cache.base.pin) is not None
            assert small.statistics().copied_bytes == 0


def test_for_another_base_it_is_understood_anew() -> None:
    with World() as world:
        version = again_in_host_memory(world)
        other = replace(world.cache.base, revision="b" * 40)
        world.cache.rebind(other)
        world.loader.base = other
        world.loader._numbers.clear()
        assert world.loader.publish("acme/a", 2, digest=version.digest).pinned == version.pinned
        for _ in range(3):
            lease = world.ready(version.pinned)
            assert [key.base for key in (lease.composition[0][0].key, lease.record.entries[0].key)] == [other.pin] * 2
            lease.release()
            with world.cache._lock:
                world.cache._stager.shelf.evict(lease.record.entries[0])


class _Moving(HostCache):
    """Trust changes as soon as it has said what it has at hand."""

    def at_hand(self, *args: Any, **options: Any) -> AtHand | None:
        here = super().at_hand(*args, **options)
        if here is not None:
            self._loader.trust_changes += 1  # type: ignore[misc]
        return here


def test_what_trust_has_changed_about_meanwhile_is_verified_again() -> None:
    with World(host_kind=_Moving) as world:
        version = in_host_memory(world, "acme/a")
        before = world.copied
        lease = world.acquire(version.pinned)
        assert (state(lease), world.copied) == (LeaseState.WAITING, before)
        world.settle()
        assert lease.ready
        assert world.loader.calls == ["prepare acme/a"]


def test_what_another_worker_had_verified_anew_need_not_be_verified_again() -> None:
    with World() as world:
        version = again_in_host_memory(world)
        world.loader.trust_changes += 1
        with second_cache(world) as second:
            other = second.acquire(version.pinned, tenant="acme")
            world.pool.run_all()
            assert state(other) is LeaseState.COPYING
            assert world.loader.calls == ["prepare acme/a"]
            assert state(world.acquire(version.pinned)) is LeaseState.COPYING
            assert world.loader.calls == ["prepare acme/a"]


def test_who_signed_it_is_as_the_host_says_now() -> None:
    with World() as world:
        version = again_in_host_memory(world, publisher="k1")
        world.cache._host.forget(version.resolved.key)
        world.loader._numbers.clear()
        world.loader.publish("acme/a", 2, digest=version.digest, publisher="k2")
        with second_cache(world) as second:
            other = second.acquire(version.pinned, tenant="acme")
            world.pool.run_all()
            assert state(other) is LeaseState.COPYING
            lease = world.ready(version.pinned)
            world.cache.revoke(Revocation("acme", key_id="k2"))
            assert lease.problem is not None
            assert lease.problem.code is Code.VERSION_REVOKED


def test_what_a_step_hears_of_takes_its_room_at_the_next_look() -> None:
    with World() as world:
        version = in_host_memory(world, "acme/a")
        before = world.copied
        world.cache._stager.line_up(True)  # as at a step's end, while the host answers
        lease = world.acquire(version.pinned)
        assert (state(lease), world.copied) == (LeaseState.WAITING, before)
        world.cache._stager.line_up(False)
        world.pump()
        assert state(lease) is LeaseState.COPYING


def test_it_overtakes_nobody_who_waits_for_room() -> None:
    with World(vram=4, host=12) as world:
        small, large = in_host_memory(world, "acme/a", 1), in_host_memory(world, "acme/b", 4)
        world.loader.publish("acme/c", 2)
        held = world.ready("acme/c")
        first, late = world.acquire(large.pinned), world.acquire(small.pinned)
        assert [state(lease) for lease in (first, late)] == [LeaseState.WAITING] * 2
        held.release()
        world.settle()
        assert [lease.ready for lease in (first, late)] == [True, False]
        first.release()
        world.settle()
        assert late.ready


def test_a_policy_is_asked_once_for_a_lease_that_finds_no_room() -> None:
    asked: list[int] = []

    class Counting:
        def order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
            asked.append(len(candidates))
            return list(candidates)

    with World(vram=4, host=8, policy=Counting()) as world:
        version = in_host_memory(world, "acme/a", 3)
        world.loader.publish("acme/b", 2), world.loader.publish("acme/c", 1)
        held = world.ready("acme/b")
        world.ready("acme/c").release()
        asked.clear()
        waiting = world.acquire(version.pinned)
        assert state(waiting) is LeaseState.WAITING
        assert asked == [1]
        held.release()
        world.settle()
        assert (waiting.ready, asked) == (True, [1, 2])
