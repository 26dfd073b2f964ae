"""How leases end: released, dropped, cancelled; and what names their outputs until then."""

from __future__ import annotations

import gc

import pytest

from adapterd.gpu_cache import Lease, LeaseState
from adapterd.loader.errors import AdapterdError, Code
from fakes.cache_world import World
from fakes.late_host import LateHost


def test_release_is_idempotent() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        one, two = world.ready("acme/a"), world.ready("acme/a")
        one.release()
        one.release()
        assert world.cache.statistics().leases[LeaseState.RELEASED] == 1
        assert two.ready
        for use in (lambda: one.composition, lambda: one.wait(0), lambda: world.cache.begin_step([one])):
            with pytest.raises(AdapterdError) as refused:
                use()
            assert refused.value.code is Code.LEASE_RELEASED


def test_a_dropped_lease_is_found_and_counted() -> None:
    with World(vram=2) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        lease: Lease | None = world.ready("acme/a")
        waiting = world.acquire("acme/b")
        world.settle()
        assert not waiting.ready
        assert lease is not None
        lease = None
        gc.collect()
        world.settle()
        assert waiting.ready
        assert world.cache.statistics().leaked_leases == 1


def test_a_released_or_failed_lease_is_no_leak() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        world.ready("acme/a").release()
        world.failure("acme/none")
        gc.collect()
        world.cache.pump()
        statistics = world.cache.statistics()
        assert statistics.leaked_leases == 0
        assert sum(statistics.leases[state] for state in LeaseState if state is not LeaseState.RELEASED) == 0


@pytest.mark.parametrize("jobs", range(4))
def test_release_cancels_what_only_it_waited_for(jobs: int) -> None:
    with World() as world:
        world.loader.publish("acme/a", 2)
        lease = world.acquire("acme/a")
        for _ in range(jobs):
            world.pool.run_one()
        lease.release()
        world.settle()
        done = {call.split()[0] for call in world.loader.calls}
        assert done == set(["resolve", "prepare", "fill"][:jobs])
        assert (world.host_free == 16) == (jobs < 3)
        assert world.ready("acme/a").ready


def test_what_was_cancelled_and_is_wanted_again_is_loaded() -> None:
    with World() as world:
        world.loader.publish("acme/a", 2)
        lease = world.acquire("acme/a")
        world.pool.run_one()
        lease.release()
        again = world.acquire("acme/a")
        world.settle()
        assert again.ready


def test_the_prefix_key_is_known_once_resolved() -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        lease = world.acquire("acme/a")
        with pytest.raises(AdapterdError) as early:
            lease.prefix_key()
        assert early.value.code is Code.LEASE_NOT_READY
        world.pool.run_one()
        assert not lease.ready
        key = lease.prefix_key()
        assert world.acquire([(version.pinned, 0.5), ("acme/a", 0.5)]).failed is False
        half = world.acquire([(version.pinned, 0.5), ("acme/a", 0.5)])
        world.settle()
        assert half.prefix_key() == key == world.ready(version.pinned).prefix_key()
        nothing = world.ready([("acme/a", 1.0), (version.pinned, -1.0)])
        assert nothing.composition == ()
        assert nothing.prefix_key() == world.acquire(None).prefix_key() != key


def test_what_the_host_holds_is_given_back_once_and_nothing_else_is() -> None:
    """An answered look-up holds nothing: another process would have to be told for no reason."""
    with World(host_kind=LateHost) as world:
        assert isinstance(world.host, LateHost)
        world.loader.publish("acme/a", 2)
        lease = world.ready("acme/a")
        lease.pause()
        lease.release()
        kinds = [world.host.asked[number] for number in world.host.released]
        assert "resolve" not in kinds
        assert set(kinds) == set(world.host.asked.values()) - {"resolve"}


def test_a_look_up_that_comes_after_the_release_changes_nothing() -> None:
    """The host gave its answer just before it was told that nobody waits for it."""
    with World(host_kind=LateHost) as world:
        assert isinstance(world.host, LateHost)
        world.loader.publish("acme/a", 2)
        lease = world.acquire("acme/a")
        world.host.late = True
        world.pool.run_all()
        lease.release()
        assert world.host.arrive() == 1
        world.host.late = False
        world.settle()
        assert lease.released
        assert world.loader.calls == ["resolve acme/a"]
        assert world.cache.statistics().leases == dict.fromkeys(LeaseState, 0) | {LeaseState.RELEASED: 1}
