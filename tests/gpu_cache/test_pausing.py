"""Leases that are given back for a while: what a paused one holds (nothing), what it remembers, how it comes back."""

from __future__ import annotations

import gc
import threading
from itertools import product

import pytest

from adapterd.gpu_cache import Lease, LeaseState, Resident, TenantBudget
from adapterd.gpu_cache.host.interface import Origin
from adapterd.gpu_cache.records import Entry
from adapterd.gpu_cache.revocation import Revocation
from adapterd.loader.errors import AdapterdError, Code
from fakes.adapters import make_base
from fakes.cache_world import World
from fakes.late_host import LateHost

WISH = [("acme/a", 0.5), ("acme/b", -1.0)]


def resumed(world: World, lease: Lease) -> Lease:
    lease.resume()
    world.settle()
    return lease


def test_a_paused_lease_gives_its_room_to_others_and_takes_the_same_versions_again() -> None:
    with World(vram=4) as world:
        old = world.loader.publish("acme/a", 4)
        world.loader.publish("acme/b", 4)
        lease = world.ready("acme/a")
        key = lease.prefix_key()
        lease.pause()
        assert (lease.paused, lease.ready, lease.failed) == (True, False, False)
        assert lease.prefix_key() == key
        world.loader.publish("acme/a", 4)  # the alias moves on
        world.ready("acme/b").release()
        world.loader.calls.clear()
        resumed(world, lease)
        assert lease.ready
        assert "resolve acme/a" not in world.loader.calls
        assert lease.composition[0][0].key.digest == old.digest
        assert lease.prefix_key() == key
        world.step(lease)
        world.settle()
        assert world.violations == []


def test_a_composition_comes_back_with_its_weights() -> None:
    with World() as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        lease = world.ready(WISH)
        before = [(r.key, w) for r, w in lease.composition]
        lease.pause()
        assert [(r.key, w) for r, w in resumed(world, lease).composition] == before


def test_the_base_can_be_paused() -> None:
    with World() as world:
        lease = world.acquire(None)
        key = lease.prefix_key()
        lease.pause()
        assert not lease.ready
        lease.resume()
        assert lease.ready
        assert lease.prefix_key() == key


def test_pausing_and_resuming_are_idempotent_and_counted() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        for _ in range(3):
            lease.pause()
        assert world.cache.statistics().leases[LeaseState.PAUSED] == 1
        for _ in range(3):
            lease.resume()
        world.settle()
        assert lease.ready
        lease.resume()
        assert lease.ready
        lease.release()
        statistics = world.cache.statistics()
        assert statistics.leases == dict.fromkeys(LeaseState, 0) | {LeaseState.RELEASED: 1}


@pytest.mark.parametrize(("jobs", "work"), list(product(range(9), [0, 3])))
def test_a_pause_at_any_moment_returns_every_resource(jobs: int, work: int) -> None:
    with World(vram=4, host=8, keep_host=False) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        lease = world.acquire(WISH)
        for _ in range(jobs):
            world.pool.run_one()
        world.pump()
        world.device.run(work)
        lease.pause()
        assert lease.paused
        world.settle()
        assert lease.paused
        assert world.host_free == 8
        world.loader.publish("acme/large", 4)
        world.ready("acme/large").release()  # nothing is pinned
        assert resumed(world, lease).ready
        world.step(lease)
        lease.release()
        world.settle()
        assert world.violations == []
        assert world.host_free == 8


@pytest.mark.parametrize("jobs", range(6))
def test_a_resume_that_comes_at_once_is_served(jobs: int) -> None:
    """What the paused lease had asked for must not be taken for the resumed one's answer, nor be lost."""
    with World(vram=4) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        lease = world.acquire(WISH)
        for _ in range(jobs):
            world.pool.run_one()
        for _ in range(2):
            lease.pause()
            lease.resume()
        world.settle()
        assert lease.ready
        world.step(lease)
        world.settle()
        assert world.violations == []


def test_a_paused_lease_keeps_nothing_of_its_versions_alive() -> None:
    """A worker may have thousands of them, and each version's books are as large as its manifest."""
    with World(vram=2) as world:
        version = world.loader.publish("acme/kept-by-nobody", 2)
        lease = world.ready("acme/kept-by-nobody")
        lease.pause()
        world.cache.evict("acme/kept-by-nobody", tenant="acme")
        gc.collect()
        books = [each for each in gc.get_objects() if type(each) in {Entry, Resident}]
        assert [each for each in books if each.key.digest == version.digest] == []
        assert resumed(world, lease).ready


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_lease_waited_for_before_its_pause_is_counted_once_and_where_it_was_found(jobs: int) -> None:
    with World() as world:
        world.loader.publish("acme/a", 2)
        lease = world.acquire("acme/a")
        for _ in range(jobs):
            world.pool.run_one()
        lease.pause()
        assert resumed(world, lease).ready
        found = world.cache.statistics()
        assert (found.hits, sum(found.origins.values())) == (0, 1)


def test_a_lease_that_had_waited_for_room_alone_begins_again_with_its_bytes() -> None:
    """It holds no host memory while it waits for room; after its pause it is a lease like any other."""
    with World(vram=2, host=4, keep_host=False) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        held, lease = world.ready("acme/a"), world.acquire("acme/b")
        world.settle()
        lease.pause()
        held.release()
        world.loader.calls.clear()
        assert resumed(world, lease).ready
        found = world.cache.statistics()
        assert (found.hits, found.loads[Origin.DISK]) == (0, 1)
        world.step(lease)
        world.settle()
        assert world.violations == []


@pytest.mark.parametrize("known", [True, False])
def test_a_look_up_that_comes_after_the_pause_changes_nothing(known: bool) -> None:
    """The host gave its answer just before it was told that nobody waits for it."""
    with World(host_kind=LateHost) as world:
        assert isinstance(world.host, LateHost)
        if known:
            world.loader.publish("acme/a")
        lease = world.acquire("acme/a")
        world.host.late = True
        world.pool.run_all()
        lease.pause()
        assert world.host.arrive() == 1
        assert (lease.paused, lease.problem) == (True, None)
        world.host.late = False
        new = world.loader.publish("acme/a")
        assert resumed(world, lease).composition[0][0].key.digest == new.digest


def test_paused_before_it_was_resolved_it_resolves_when_it_is_resumed() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.acquire("acme/a")
        lease.pause()
        with pytest.raises(AdapterdError) as early:
            lease.prefix_key()
        assert early.value.code is Code.LEASE_NOT_READY
        new = world.loader.publish("acme/a")
        assert resumed(world, lease).composition[0][0].key.digest == new.digest


def test_a_step_in_flight_finishes_and_keeps_the_pages() -> None:
    with World(vram=4) as world:
        world.loader.publish("acme/a", 4), world.loader.publish("acme/b", 4)
        lease = world.ready("acme/a")
        resident = lease.composition[0][0]
        ticket = world.cache.begin_step([lease])
        lease.pause()
        other = world.acquire("acme/b")
        world.settle()
        assert not other.ready
        world.launch_check(resident)
        ticket.end()
        world.settle()
        assert other.ready
        assert world.violations == []


def test_a_paused_lease_is_refused_by_steps_and_waits_say_why() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        lease.pause()
        for use in (lambda: world.cache.begin_step([lease]), lambda: lease.composition, lambda: lease.wait(5)):
            with pytest.raises(AdapterdError) as refused:
                use()
            assert refused.value.code is Code.LEASE_NOT_READY
            assert "paused" in refused.value.problem.message
        assert world.cache.statistics().steps_in_flight == 0


def test_a_paused_lease_keeps_its_age() -> None:
    with World(vram=4) as world:
        for name in "abc":
            world.loader.publish(f"acme/{name}", 4)
        older = world.ready("acme/a")
        older.pause()
        held, younger = world.ready("acme/b"), world.acquire("acme/c")
        world.settle()
        older.resume()
        world.settle()
        held.release()
        world.settle()
        assert (older.ready, younger.ready) == (True, False)


def test_what_happened_meanwhile_fails_it_with_the_reason() -> None:
    with World() as world:
        for name in "abc":
            world.loader.publish(f"acme/{name}")
        version = world.loader.publish("acme/d")
        reloaded, revoked, closed = world.ready("acme/a"), world.ready("acme/d"), world.ready("acme/c")
        for lease in (reloaded, revoked, closed):
            lease.pause()
        world.cache.revoke(Revocation("acme", digest=version.digest))
        closed.release()
        world.cache.rebind(make_base("b" * 40))
        for lease, code in ((reloaded, Code.SLOT_STALE), (revoked, Code.VERSION_REVOKED)):
            lease.resume()
            assert lease.problem is not None
            assert lease.problem.code is code
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        lease.pause()
    lease.resume()
    assert lease.problem is not None
    assert lease.problem.code is Code.CACHE_CLOSED


def test_after_a_release_it_cannot_be_resumed() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        lease.pause()
        lease.release()
        lease.release()
        lease.pause()
        assert lease.released
        with pytest.raises(AdapterdError) as refused:
            lease.resume()
        assert refused.value.code is Code.LEASE_RELEASED


def test_a_paused_lease_that_is_dropped_is_a_leak() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        lease.pause()
        del lease
        world.pump()
        assert world.cache.statistics().leaked_leases == 1


def test_a_resumed_lease_counts_among_those_that_wait() -> None:
    with World(vram=2, tenants={"acme": TenantBudget(max_waiting=1)}) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2), world.loader.publish("acme/c", 2)
        paused = world.ready("acme/a")
        paused.pause()
        held, waiting = world.ready("acme/b"), world.acquire("acme/c")
        paused.resume()
        assert paused.problem is not None
        assert paused.problem.code is Code.QUEUE_FULL
        held.release()
        world.settle()
        assert waiting.ready


def test_trust_that_changed_meanwhile_counts() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        lease.pause()
        world.loader.trust_changes += 1
        world.loader.calls.clear()
        assert resumed(world, lease).ready
        assert world.loader.calls == ["prepare acme/a"]


def test_threads_pause_and_resume_one_lease_at_once() -> None:
    with World() as world:
        world.loader.publish("acme/a", 2)
        lease = world.ready("acme/a")

        def flip() -> None:
            for _ in range(200):
                lease.pause()
                lease.resume()

        threads = [threading.Thread(target=flip) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        lease.resume()
        world.settle()
        assert lease.ready
        lease.release()
        assert sum(world.cache.statistics().leases.values()) == 1
