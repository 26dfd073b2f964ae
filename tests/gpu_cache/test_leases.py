"""What a lease says of itself."""

from __future__ import annotations

import pytest

from adapterd.loader.errors import AdapterdError, Code, reject
from fakes.cache_world import World


def test_a_lease_says_what_it_is_for() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        assert repr(world.acquire(None)) == "<Lease base for acme: ready>"
        assert repr(world.acquire([("acme/a", 0.5)])) == "<Lease 0.5·acme/a for acme: resolving>"


def test_what_cannot_be_used_is_named() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        adapter, base = world.acquire("acme/a"), world.acquire(None)
        for lease, name in ((adapter, "acme/a"), (base, "base")):
            lease.release()
            with pytest.raises(AdapterdError) as released:
                _ = lease.composition
            assert released.value.problems[0].where == name


def test_what_is_used_after_its_release_never_reads_who_came_after() -> None:
    """Its pages and its slot are another tenant's by then."""
    with World(vram=2, max_residents=1) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("blue/b", 2)
        gone = world.ready("acme/a")
        ((old, _),) = gone.composition
        gone.release()
        other = world.ready("blue/b")
        ((new, _),) = other.composition
        assert (new.slot, set(new.pages)) == (old.slot, set(old.pages))
        for leases in ([gone], [other, gone], [gone, other]):
            with pytest.raises(AdapterdError) as released:
                world.cache.begin_step(leases)
            assert released.value.code is Code.LEASE_RELEASED
        with pytest.raises(AdapterdError):
            gone.resume()
        gone.release()
        assert other.ready and world.cache.statistics().steps_in_flight == 0


def test_a_failed_lease_has_no_prefix_key_though_it_was_resolved() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        world.loader.failures["fill acme/a"] = reject(Code.CHUNK_MISMATCH, "weights", "chunk 3")
        lease = world.acquire("acme/a")
        world.settle()
        with pytest.raises(AdapterdError) as refused:
            lease.prefix_key()
        assert refused.value.code is Code.CHUNK_MISMATCH


def test_the_first_reason_stays() -> None:
    """A reload and a closing fail what lives; what has failed keeps its reason."""
    with World() as world:
        lease = world.acquire("acme/none")
        world.settle()
        world.cache.rebind(world.cache.base)
        assert lease.problem is not None
        assert lease.problem.code is Code.NOT_FOUND
    assert lease.problem.code is Code.NOT_FOUND
