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
