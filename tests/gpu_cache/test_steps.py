"""Steps: what they pin, which copies they issue, and what a reload or the end leaves of them."""

from __future__ import annotations

import pytest

from adapterd.loader.errors import AdapterdError, Code
from fakes.adapters import make_base, wrong_pages
from fakes.cache_world import World

# Steps


def test_a_step_takes_ready_leases_only_and_pins_all_or_nothing() -> None:
    with World() as world:
        world.loader.publish("acme/a"), world.loader.publish("acme/b")
        ready, late = world.ready("acme/a"), world.acquire("acme/b")
        with pytest.raises(AdapterdError) as refused:
            world.cache.begin_step([ready, late])
        assert refused.value.code is Code.LEASE_NOT_READY
        assert world.cache.statistics().steps_in_flight == 0
        ready.release()
        world.settle()
        assert late.ready


def test_a_step_in_flight_pins_what_it_reads_though_the_lease_is_gone() -> None:
    with World(vram=2) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        lease = world.ready("acme/a")
        ticket = world.cache.begin_step([lease, None, lease])
        lease.release()
        waiting = world.acquire("acme/b")
        world.settle()
        assert not waiting.ready
        ticket.end()
        ticket.end()
        world.settle()
        assert waiting.ready


def test_copies_are_issued_by_steps_while_steps_run_and_all_at_once_when_idle() -> None:
    with World(vram=16, pages_per_step=2) as world:
        world.loader.publish("acme/a", 1), world.loader.publish("acme/b", 5)
        running = world.ready("acme/a")
        late = world.acquire("acme/b")
        world.step(running)
        world.pool.run_all()
        world.cache.pump()
        assert world.copied == 1  # a step's kernels are on their way: nothing in front of the next
        for copied in (3, 5, 6):
            world.step(running)
            assert world.copied == copied
        world.settle()
        assert late.ready
        assert wrong_pages(world.cache.arena, late.composition[0][0]) == []


def test_a_page_that_changes_tenant_is_zeroed_before_the_copy() -> None:
    with World(vram=2, host=8) as world:
        for name in ("acme/a", "acme/b", "blue/c"):
            world.loader.publish(name, 2)
        world.ready("acme/a").release()
        world.ready("acme/b").release()
        assert world.zeroed == 0
        world.ready("blue/c").release()
        assert world.zeroed == 2


# Base reload and end


def test_after_a_reload_nothing_of_the_old_base_serves() -> None:
    with World(vram=4, host=8) as world:
        for name in "abc":
            world.loader.publish(f"acme/{name}", 2)
        ready, loading, base = world.ready("acme/a"), world.acquire("acme/b"), world.acquire(None)
        world.pool.run_one()
        resolving = world.acquire("acme/c")
        new = make_base("b" * 40)
        world.cache.rebind(new)
        for lease in (ready, loading, base, resolving):
            assert lease.problem is not None
            assert lease.problem.code is Code.SLOT_STALE
        assert (world.vram_free, world.cache.base) == (4, new)
        world.settle()
        assert (world.vram_free, world.host_free) == (4, 8)
        world.loader.base = new
        world.loader.publish("acme/a", 2)
        assert world.ready("acme/a").composition[0][0].key.base == new.pin


def test_closing_fails_what_waits_and_refuses_what_comes() -> None:
    world = World()
    world.loader.publish("acme/a")
    with pytest.raises(AdapterdError) as early:
        world.acquire("acme/a")
    assert early.value.code is Code.CACHE_CLOSED
    with world:
        waiting = world.acquire("acme/a")
    assert waiting.problem is not None
    assert waiting.problem.code is Code.CACHE_CLOSED
    for use in (lambda: world.acquire("acme/a"), lambda: world.cache.begin_step([]), lambda: waiting.wait(5)):
        with pytest.raises(AdapterdError) as late:
            use()
        assert late.value.code is Code.CACHE_CLOSED
    waiting.release()
    with pytest.raises(RuntimeError, match="opened once"), world:
        pass
