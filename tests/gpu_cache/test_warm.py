"""The short way gives what the long way would, and is left as soon as anything it stands on has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adapterd.gpu_cache import AdapterCache, LeaseState
from adapterd.gpu_cache.revocation import Revocation
from adapterd.gpu_cache.warm import WarmLeases
from adapterd.loader.errors import Code
from fakes.cache_world import World


def test_a_lease_on_what_is_in_vram_asks_nobody_and_is_as_the_first_was() -> None:
    with World() as world:
        version = world.loader.publish("acme/a", 2)
        first = world.ready(version.pinned)
        second = world.acquire(version.pinned)
        world.loader.calls.clear()
        third = world.acquire(version.pinned)
        assert world.loader.calls == []
        assert third.ready
        assert third.composition == second.composition == first.composition
        assert third.prefix_key() == first.prefix_key()
        assert third.record.claims == first.record.claims
        assert third.record.residents is second.record.residents  # nothing was put together anew: the short way
        for lease in (first, second, third):
            lease.release()
        statistics = world.cache.statistics()
        assert (statistics.hits, statistics.leases[LeaseState.RELEASED]) == (2, 3)


def test_it_pins() -> None:
    with World(vram=4) as world:
        version = world.loader.publish("acme/a", 3)
        world.loader.publish("acme/b", 3)
        for _ in range(2):
            world.ready(version.pinned).release()
        lease = world.acquire(version.pinned)
        other = world.acquire("acme/b")
        world.settle()
        assert lease.ready
        assert not other.ready
        lease.release()
        world.settle()
        assert other.ready


def _evicted(world: World, cache: AdapterCache) -> None:
    cache.evict("acme/a", tenant="acme")


def _revoked(world: World, cache: AdapterCache) -> None:
    cache.revoke(Revocation("acme", adapter="a"))


def _drained(world: World, cache: AdapterCache) -> None:
    cache.drain(True)


def _reloaded(world: World, cache: AdapterCache) -> None:
    cache.rebind(world.loader.base)


def _distrusted(world: World, cache: AdapterCache) -> None:
    world.loader.trust_changes += 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_evicted, None), (_reloaded, None), (_distrusted, None),
        (_revoked, Code.VERSION_REVOKED), (_drained, Code.CACHE_DRAINING),
    ],
)  # fmt: skip
def test_after_a_change_it_is_not_taken(change: Callable[[World, AdapterCache], None], code: Code | None) -> None:
    with World() as world:
        version = world.loader.publish("acme/a", 2)
        for _ in range(3):
            world.ready(version.pinned).release()
        world.ready("acme/a").release()  # so that the name is known
        change(world, world.cache)
        world.loader.calls.clear()
        lease = world.acquire(version.pinned)
        assert not lease.ready
        world.settle()
        if code is None:
            assert lease.ready
            world.step(lease)
            world.settle()
            assert world.violations == []
        else:
            assert lease.problem is not None
            assert lease.problem.code is code


def test_another_tenant_is_told_nothing() -> None:
    with World() as world:
        version = world.loader.publish("acme/a", 2)
        for _ in range(3):
            world.ready(version.pinned).release()
        assert world.failure(version.pinned, "blue") is Code.NOT_FOUND


def test_what_is_remembered_is_bounded() -> None:
    with World(vram=8) as world:
        versions = [world.loader.publish(f"acme/a{i}") for i in range(5)]
        leases = [world.ready(version.pinned) for version in versions]
        seen = WarmLeases(2)
        for version, lease in zip(versions, leases, strict=True):
            seen.remember(version.pinned, lease.record)
        assert len(seen) == 1
        known = [version for version in versions if seen.meaning("acme", version.pinned, world.cache.base.pin)]
        assert known == versions[4:]


def test_what_a_step_still_reads_after_a_reload_is_not_given_out() -> None:
    with World() as world:
        version = world.loader.publish("acme/a", 2)
        leases = [world.ready(version.pinned) for _ in range(3)]
        ticket = world.cache.begin_step(leases[:1])
        world.cache.rebind(world.loader.base)
        lease = world.acquire(version.pinned)
        assert not lease.ready
        ticket.end()
        world.settle()
        world.step(lease)
        world.settle()
        assert world.violations == []


def test_a_name_that_holds_no_more_is_refused_though_its_bytes_stay_under_another() -> None:
    with World() as world:
        version = world.loader.publish("acme/a", 2, publisher="k1")
        world.loader.publish("acme/b", 2, digest=version.digest, publisher="k2")
        for _ in range(3):
            world.ready(version.pinned).release()
        other = world.ready("acme/b")
        world.cache.revoke(Revocation("acme", key_id="k1"))
        assert world.failure(version.pinned) is Code.VERSION_REVOKED
        assert other.ready


def test_who_was_used_the_short_way_longest_ago_goes_first() -> None:
    with World(vram=9) as world:
        versions = {name: world.loader.publish(f"acme/{name}", 3) for name in "abcde"}
        for name in "abc":
            for _ in range(2):
                world.ready(versions[name].pinned).release()
        for name in "ba":
            world.acquire(versions[name].pinned).release()
        for name, goes in (("d", "c"), ("e", "b")):
            world.ready(versions[name].pinned).release()
            assert versions[goes].resolved.key not in world.cache._stager.entries
        assert versions["a"].resolved.key in world.cache._stager.entries
