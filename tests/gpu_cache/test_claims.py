"""Checks of what leases claim: shared, withdrawn with the last who waits, and asked anew after that."""

from __future__ import annotations

import pytest

from adapterd.loader.errors import Code, reject
from fakes.cache_world import World


@pytest.mark.parametrize("jobs", range(3))
def test_after_a_check_that_was_given_up_the_next_lease_asks_again(jobs: int) -> None:
    with World(vram=4) as world:
        version = world.loader.publish("acme/a", 2)
        world.ready("acme/a").release()
        world.loader.trust_changes += 1
        given_up = world.acquire(version.pinned)
        for _ in range(jobs):
            world.pool.run_one()
        given_up.release()
        lease = world.acquire(version.pinned)
        world.settle()
        assert lease.ready
        world.step(lease)
        world.settle()
        assert world.violations == []


def test_a_claim_that_does_not_hold_fails_nobody_who_made_another_on_the_same_bytes() -> None:
    with World(vram=4) as world:
        first = world.loader.publish("acme/a", 2)
        world.loader.publish("acme/b", 2, digest=first.digest)
        world.loader.failures["prepare acme/b"] = reject(Code.KEY_REVOKED, "acme/b", "not what was admitted")
        good, bad = world.acquire("acme/a"), world.acquire("acme/b")
        world.settle()
        assert good.ready
        assert bad.problem is not None
        assert bad.problem.code is Code.KEY_REVOKED


def test_one_adapter_alone_may_have_too_large_a_rank() -> None:
    with World(vram=4, max_composition_rank=8) as world:
        world.loader.publish("acme/a", rank=8), world.loader.publish("acme/b", rank=16)
        assert world.ready("acme/a").ready
        assert world.failure("acme/b") is Code.COMPOSITION_INVALID
