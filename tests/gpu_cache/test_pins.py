"""What the cache holds by itself: prefetches, pins; and what operators may take from it: evictions, a drain."""

from __future__ import annotations

import gc

import pytest

from adapterd.gpu_cache import LeaseState, Place, TenantBudget
from adapterd.gpu_cache.vram_tier import Cause
from adapterd.loader.errors import AdapterdError, Code
from fakes.adapters import PAGE_BYTES
from fakes.cache_world import World, pages


def code_of(lease: object) -> Code | None:
    problem = lease.problem  # type: ignore[attr-defined]
    return None if problem is None else problem.code


def resident(world: World) -> set[str]:
    return {name for row in world.cache.residency() if row.tier is Place.RESIDENT for name in row.adapters}


def published(world: World, size: int, *names: str) -> None:
    for name in names:
        world.loader.publish(name, size)


# Prefetching


def test_a_prefetch_brings_it_and_lets_go() -> None:
    with World(vram=4) as world:
        published(world, 4, "acme/a", "acme/b")
        coming = world.cache.prefetch("acme/a", tenant="acme")
        assert not coming.ready
        world.settle()
        assert coming.ready
        assert coming.wait(0) is coming
        assert resident(world) == {"a"}
        with pytest.raises(AdapterdError) as refused:
            world.cache.begin_step([coming])
        assert refused.value.code is Code.LEASE_RELEASED
        world.loader.calls.clear()
        assert world.ready("acme/a").ready
        assert world.loader.calls == ["resolve acme/a"]


def test_a_prefetch_whose_result_nobody_keeps_is_no_leak() -> None:
    with World() as world:
        published(world, 2, "acme/a")
        world.cache.prefetch("acme/a", tenant="acme")
        gc.collect()
        world.settle()
        statistics = world.cache.statistics()
        assert resident(world) == {"a"}
        assert statistics.leaked_leases == 0
        assert statistics.leases == dict.fromkeys(LeaseState, 0) | {LeaseState.RELEASED: 1}


def test_a_prefetch_to_host_takes_no_vram_and_holds_no_host_memory_afterwards() -> None:
    with World(vram=4, host=4) as world:
        published(world, 4, "acme/a", "acme/b")
        coming = world.cache.prefetch("acme/a", tenant="acme", to="host")
        world.pool.run_all()
        assert coming.ready  # nobody had to look
        assert world.vram_free == 4
        assert [row.tier for row in world.cache.residency()] == [Place.HOST]
        world.loader.calls.clear()
        world.ready("acme/a").release()
        assert world.loader.calls == ["resolve acme/a"]
        second = world.cache.prefetch("acme/b", tenant="acme", to="host")
        world.settle()
        assert second.ready  # "a" has given way: nobody holds it there


def test_a_prefetch_to_host_of_what_is_in_vram_is_done_at_once() -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        world.ready("acme/a").release()
        world.loader.calls.clear()
        assert world.cache.prefetch(version.pinned, tenant="acme", to="host").ready
        assert world.loader.calls == []


def test_a_prefetch_pushes_out_nothing_that_was_used() -> None:
    with World(vram=4) as world:
        published(world, 2, "acme/used", "acme/a", "acme/b")
        world.ready("acme/used").release()
        for name in ("acme/a", "acme/b"):  # the second takes the room of the first, which nobody has used
            coming = world.cache.prefetch(name, tenant="acme")
            world.settle()
            assert coming.ready
        assert resident(world) == {"used", "b"}
        world.ready("acme/b").release()
        refused = world.cache.prefetch("acme/a", tenant="acme")
        world.settle()
        assert code_of(refused) is Code.BUDGET_EXCEEDED
        assert resident(world) == {"used", "b"}
        assert world.cache.statistics().evictions[Cause.ROOM] == 1


def test_what_was_used_stays_so_whoever_prefetches_it() -> None:
    with World(vram=4) as world:
        published(world, 4, "acme/a", "acme/b")
        world.ready("acme/a").release()
        again = world.cache.prefetch("acme/a", tenant="acme")
        world.settle()
        assert again.ready
        other = world.cache.prefetch("acme/b", tenant="acme")
        world.settle()
        assert code_of(other) is Code.BUDGET_EXCEEDED
        assert resident(world) == {"a"}


def test_a_prefetch_takes_nothing_from_another_tenants_prefetches() -> None:
    with World(vram=2) as world:
        published(world, 2, "acme/a", "blue/b")
        world.cache.prefetch("acme/a", tenant="acme")
        world.settle()
        refused = world.cache.prefetch("blue/b", tenant="blue")
        world.settle()
        assert code_of(refused) is Code.BUDGET_EXCEEDED
        assert resident(world) == {"a"}


def test_a_prefetch_takes_no_room_while_a_lease_waits_for_some() -> None:
    with World(vram=4) as world:
        published(world, 2, "acme/held", "acme/small")
        published(world, 4, "blue/large")
        held = world.ready("acme/held")
        waiting = world.acquire("blue/large")
        world.settle()
        coming = world.cache.prefetch("acme/small", tenant="acme", priority=9)
        world.settle()
        assert code_of(coming) is Code.BUDGET_EXCEEDED
        held.release()
        world.settle()
        assert waiting.ready


def test_a_lease_takes_what_was_prefetched() -> None:
    with World(vram=2) as world:
        published(world, 2, "acme/a", "acme/b")
        world.cache.prefetch("acme/a", tenant="acme")
        world.settle()
        assert world.ready("acme/b").ready


def test_a_prefetch_that_fails_says_why_and_is_forgotten() -> None:
    with World() as world:
        coming = world.cache.prefetch("acme/none", tenant="acme")
        foreign = world.cache.prefetch("acme/none", tenant="blue")
        bad = world.cache.prefetch("no ref", tenant="acme")
        world.settle()
        assert [code_of(x) for x in (coming, foreign, bad)] == [Code.NOT_FOUND, Code.NOT_FOUND, Code.REF_INVALID]
        with pytest.raises(AdapterdError):
            coming.wait(0)
        assert not any(n for s, n in world.cache.statistics().leases.items() if s is not LeaseState.RELEASED)


@pytest.mark.parametrize("jobs", range(6))
def test_a_prefetch_can_be_given_up(jobs: int) -> None:
    with World(vram=4, host=4, keep_host=False) as world:
        published(world, 2, "acme/a")
        coming = world.cache.prefetch("acme/a", tenant="acme")
        for _ in range(jobs):
            world.pool.run_one()
        coming.release()
        world.settle()
        assert world.host_free == 4
        assert sum(world.cache.statistics().leases.values()) == 1


# Pins


def test_a_pin_keeps_the_version_until_it_is_let_go() -> None:
    with World(vram=4) as world:
        published(world, 2, "acme/a", "acme/b", "acme/c")
        pin = world.cache.pin("acme/a", tenant="acme")
        world.settle()
        assert pin.ready
        pin.release(), pin.pause(), pin.resume()
        del pin
        gc.collect()
        for name in ("acme/b", "acme/c"):
            world.ready(name).release()
        assert "a" in resident(world)
        (row,) = world.cache.pins()
        assert (row.tenant, row.ref, row.state, row.problem) == ("acme", "acme/a:default", LeaseState.READY, None)
        statistics = world.cache.statistics()
        assert (statistics.pinned_adapters, statistics.leaked_leases) == (1, 0)
        assert [r.pinned for r in world.cache.residency() if r.adapters == ("a",)] == [True]
        assert world.cache.unpin("acme/a:default", tenant="acme")
        assert not world.cache.unpin("acme/a", tenant="acme")
        assert world.cache.pins() == ()
        world.loader.publish("acme/large", 4)
        assert world.ready("acme/large").ready


def test_a_pin_is_the_same_until_it_fails() -> None:
    with World() as world:
        first = world.cache.pin("acme/a", tenant="acme")
        world.settle()
        assert code_of(first) is Code.NOT_FOUND
        assert world.cache.pins()[0].problem == first.problem
        world.loader.publish("acme/a")
        second = world.cache.pin("acme/a", tenant="acme")
        world.settle()
        assert second.ready
        assert world.cache.pin("acme/a:default", tenant="acme").record is second.record
        assert world.cache.statistics().leases[LeaseState.FAILED] == 0


def test_pins_stay_within_the_tenants_budget_together() -> None:
    with World(vram=8, tenants={"acme": TenantBudget(max_vram_bytes=pages(4))}) as world:
        published(world, 3, "acme/a", "acme/b")
        published(world, 8, "blue/c")
        first, second = (world.cache.pin(name, tenant="acme") for name in ("acme/a", "acme/b"))
        world.settle()
        assert sorted(lease.ready for lease in (first, second)) == [False, True]
        refused = first if first.failed else second
        assert code_of(refused) is Code.BUDGET_EXCEEDED
        assert world.cache.unpin("acme/a", tenant="acme")
        assert world.cache.unpin("acme/b", tenant="acme")
        assert world.ready("blue/c").ready


def test_a_pin_belongs_to_its_tenant() -> None:
    with World() as world:
        published(world, 1, "acme/a")
        world.cache.pin("acme/a", tenant="acme")
        foreign = world.cache.pin("acme/a", tenant="blue")
        world.settle()
        assert code_of(foreign) is Code.NOT_FOUND
        assert world.cache.unpin("acme/a", tenant="blue")
        assert [pin.tenant for pin in world.cache.pins()] == ["acme"]
        with pytest.raises(AdapterdError) as bad:
            world.cache.pin("nothing", tenant="acme")
        assert bad.value.code is Code.REF_INVALID


# Eviction


def test_an_eviction_says_what_came_free() -> None:
    with World(vram=4, host=8) as world:
        version = world.loader.publish("acme/a", 3)
        world.ready("acme/a").release()
        assert world.cache.evict("acme/a", tenant="acme") == 6 * PAGE_BYTES
        assert (world.vram_free, world.host_free) == (4, 8)
        assert world.cache.statistics().evictions[Cause.ASKED] == 1
        assert world.cache.residency() == ()
        world.ready(version.pinned).release()
        assert world.cache.evict(version.pinned, tenant="acme") == 6 * PAGE_BYTES
        world.cache.prefetch("acme/a", tenant="acme", to="host")
        world.settle()
        assert world.cache.evict("acme/a:default", tenant="acme") == 3 * PAGE_BYTES
        assert world.ready("acme/a").ready


def test_what_somebody_holds_is_not_evicted() -> None:
    def refused(world: World) -> bool:
        with pytest.raises(AdapterdError) as conflict:
            world.cache.evict("acme/a", tenant="acme")
        return conflict.value.code is Code.ADAPTER_IN_USE

    with World() as world:
        published(world, 2, "acme/a")
        lease = world.ready("acme/a")
        assert refused(world)
        ticket = world.cache.begin_step([lease])
        lease.release()
        assert refused(world)
        ticket.end()
        world.cache.pin("acme/a", tenant="acme")
        world.settle()
        assert refused(world)
        world.cache.unpin("acme/a", tenant="acme")
        waiting = world.acquire("acme/a")
        waiting.pause()
        assert world.cache.evict("acme/a", tenant="acme") > 0


def test_a_copy_under_way_is_not_evicted() -> None:
    with World() as world:
        published(world, 2, "acme/a")
        lease = world.acquire("acme/a")
        world.pool.run_all()
        world.pump()
        lease.release()
        with pytest.raises(AdapterdError) as conflict:
            world.cache.evict("acme/a", tenant="acme")
        assert conflict.value.code is Code.ADAPTER_IN_USE
        world.settle()
        assert world.cache.evict("acme/a", tenant="acme") > 0


def test_what_is_not_here_and_what_is_anothers_are_answered_alike() -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        old = world.loader.publish("acme/old")
        world.ready("acme/a").release()
        for ref, tenant in [
            (version.pinned, "blue"), ("acme/a", "blue"), ("acme/b", "acme"), ("acme/a:prod", "acme"),
            (old.pinned, "acme"), (f"acme/b@sha256:{version.digest}", "acme"),
        ]:  # fmt: skip
            with pytest.raises(AdapterdError) as absent:
                world.cache.evict(ref, tenant=tenant)
            assert absent.value.code is Code.NOT_FOUND
            assert absent.value.problem.where == ref
        assert resident(world) == {"a"}


def test_an_alias_names_what_it_meant_last() -> None:
    with World() as world:
        old = world.loader.publish("acme/a", 1)
        world.ready("acme/a").release()
        world.loader.publish("acme/a", 2)
        world.ready("acme/a").release()
        assert world.cache.evict("acme/a", tenant="acme") == 4 * PAGE_BYTES
        assert {row.digest for row in world.cache.residency()} == {old.digest}


# Draining


def test_a_drain_lets_present_leases_go_on_and_takes_no_new_ones() -> None:
    with World() as world:
        published(world, 1, "acme/a", "acme/b")
        world.cache.pin("acme/b", tenant="acme")
        present, paused = world.ready("acme/a"), world.ready("acme/a")
        paused.pause()
        world.cache.drain(True)
        assert world.cache.draining
        assert world.cache.pins() == ()
        for refused in (
            world.acquire("acme/a"), world.acquire(None), world.cache.pin("acme/a", tenant="acme"),
            world.cache.prefetch("acme/a", tenant="acme"),
        ):  # fmt: skip
            assert code_of(refused) is Code.CACHE_DRAINING
        world.step(present)
        paused.resume()
        world.settle()
        assert paused.ready
        present.release()
        ticket = world.cache.begin_step([paused])
        paused.release()
        assert not world.cache.drained
        ticket.end()
        assert world.cache.drained
        world.cache.drain(False)
        assert not world.cache.drained
        assert world.ready("acme/a").ready


# Many at once


def test_ten_thousand_at_once_stay_bounded() -> None:
    with World(tenants={"acme": TenantBudget(max_waiting=100)}) as world:
        published(world, 1, "acme/a", "blue/b")
        leases = [world.acquire("acme/a") for _ in range(10_000)]
        leases += [world.cache.prefetch("acme/a", tenant="acme") for _ in range(10)]
        refused = [lease for lease in leases if lease.failed]
        assert len(refused) == 9_910
        assert {code_of(lease) for lease in refused} == {Code.QUEUE_FULL}
        world.ready("blue/b").release()
        assert sum(lease.ready for lease in leases) == 100
        for lease in leases:
            lease.release()
        leases.clear()
        states = world.cache.statistics().leases
        assert {state for state, count in states.items() if count} == {LeaseState.RELEASED}
