"""The cache's behaviour, step by step, on a device and a loader that run when told."""

from __future__ import annotations

import pytest

from adapterd.gpu_cache import Place
from adapterd.loader.errors import Code, reject
from fakes.adapters import wrong_pages
from fakes.cache_world import World

# Places


def test_from_absent_to_resident_and_back_through_the_host() -> None:
    with World(vram=4) as world:
        first, second = world.loader.publish("acme/a", 3), world.loader.publish("acme/b", 3)
        lease = world.acquire("acme/a")
        assert world.cache.statistics().adapters == dict.fromkeys(Place, 0)
        world.pool.run_one()  # resolve
        assert world.cache.statistics().adapters[Place.ABSENT] == 1
        world.pool.run_all()
        assert world.cache.statistics().adapters[Place.STAGING] == 1
        assert not lease.ready
        world.settle()
        assert lease.ready
        assert world.cache.statistics().adapters[Place.RESIDENT] == 1
        lease.release()
        world.ready("acme/b").release()
        assert world.cache.statistics().adapters == {
            Place.ABSENT: 0,
            Place.HOST: 1,
            Place.STAGING: 0,
            Place.RESIDENT: 1,
        }
        world.loader.calls.clear()
        again = world.ready(first.pinned)
        assert world.loader.calls == []  # a host hit, pinned: neither the source nor the loader is asked
        assert wrong_pages(world.cache.arena, again.composition[0][0]) == []
        statistics = world.cache.statistics()
        assert (statistics.hits, statistics.host_hits, statistics.misses) == (0, 1, 2)
        assert second.digest != first.digest


def test_without_a_host_tier_the_slab_is_free_after_the_copy() -> None:
    with World(keep_host=False, host=3) as world:
        for name in "ab":
            world.loader.publish(f"acme/{name}", 3)
            world.ready(f"acme/{name}")
            assert world.host_free == 3


def test_the_host_tier_gives_way_oldest_first() -> None:
    with World(vram=2, host=6) as world:
        for name in "abcd":
            world.loader.publish(f"acme/{name}", 2)
            world.ready(f"acme/{name}").release()
        assert world.host_free == 0
        world.loader.calls.clear()
        world.ready("acme/b").release()
        assert "fill acme/b" not in world.loader.calls
        world.ready("acme/a").release()
        assert "fill acme/a" in world.loader.calls


def test_one_version_is_loaded_once_for_all_who_wait() -> None:
    with World() as world:
        version = world.loader.publish("acme/a", 2)
        leases = [world.acquire(ref) for ref in ("acme/a", "acme/a", version.pinned, "acme/a")]
        world.settle()
        assert all(lease.ready for lease in leases)
        assert [c for c in world.loader.calls if not c.startswith("resolve")] == ["prepare acme/a", "fill acme/a"]
        assert len({lease.composition[0][0] for lease in leases}) == 1


def test_an_alias_is_looked_up_at_every_acquire() -> None:
    with World() as world:
        old = world.loader.publish("acme/a")
        assert world.ready("acme/a").composition[0][0].key.digest == old.digest
        new = world.loader.publish("acme/a")
        assert world.ready("acme/a").composition[0][0].key.digest == new.digest


def test_the_same_bytes_under_another_name_are_verified_under_that_name() -> None:
    """A resident version must not lend its verification to another adapter's claim of the same digest."""
    with World() as world:
        version = world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        world.loader.publish("acme/b", digest=version.digest)
        world.loader.failures["prepare acme/b"] = reject(Code.STATEMENT_MISMATCH, "adapter", "not this one")
        assert world.failure("acme/b") is Code.STATEMENT_MISMATCH
        assert lease.ready
        del world.loader.failures["prepare acme/b"]
        world.loader.calls.clear()
        both = world.ready([("acme/a", 0.25), ("acme/b", 0.5)])
        assert [w for _, w in both.composition] == [0.75]
        assert world.loader.calls == ["resolve acme/a", "resolve acme/b", "prepare acme/b"]


# What was found out before


def test_a_pinned_digest_that_is_resident_is_ready_at_once() -> None:
    """Nobody is asked, nothing is queued; an alias is looked up."""
    with World() as world:
        version = world.loader.publish("acme/a")
        world.ready("acme/a").release()
        world.loader.calls.clear()
        for wish in (version.pinned, [(version.pinned, 0.5)]):
            with world.acquire(wish, "acme") as lease:
                assert lease.ready
        assert not world.pool.run_one()
        with world.acquire("acme/a") as lease:
            assert not lease.ready
            world.settle()
            assert lease.ready
        assert world.loader.calls == ["resolve acme/a"]


@pytest.mark.parametrize("pinned", [False, True])
def test_after_a_change_of_trust_what_is_resident_is_verified_again_once(pinned: bool) -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        wish = version.pinned if pinned else "acme/a"
        held = world.ready(wish)
        world.loader.trust_changes += 1
        world.loader.failures["prepare acme/a"] = reject(Code.KEY_REVOKED, "model.sig", "revoked")
        assert world.failure(wish) is Code.KEY_REVOKED
        world.step(held)  # a lease that is held serves on
        del world.loader.failures["prepare acme/a"]
        world.loader.calls.clear()
        world.ready(wish).release()
        world.ready(wish).release()
        assert [c for c in world.loader.calls if not c.startswith("resolve")] == ["prepare acme/a"]


def test_a_change_of_trust_while_the_loader_verifies_counts() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.acquire("acme/a")
        world.pool.run_one()  # resolved; the verification is queued
        world.loader.trust_changes += 1
        world.settle()
        assert lease.ready
        assert world.loader.calls.count("prepare acme/a") == 2
