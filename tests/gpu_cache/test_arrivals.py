"""How bytes get from host memory into claimed room, and what is counted of it."""

from __future__ import annotations

from adapterd.gpu_cache.arrivals import Loads
from adapterd.gpu_cache.host.interface import Origin
from fakes.cache_world import World, pages


def test_loads_are_counted_by_where_the_bytes_were() -> None:
    with World(vram=4) as world:
        world.loader.publish("acme/a", 3), world.loader.publish("acme/b", 2)
        world.ready("acme/a").release()
        world.ready("acme/b").release()
        first = world.cache.statistics()
        assert first.copied_bytes == pages(5)
        assert (first.loads[Origin.SOURCE], first.loads[Origin.HOST]) == (2, 0)
        world.ready("acme/a")
        second = world.cache.statistics()
        assert second.copied_bytes == pages(8)
        assert second.loads[Origin.HOST] == 1
        assert (first.copied_bytes, first.loads[Origin.HOST]) == (pages(5), 0)


def test_who_finds_that_others_have_its_bytes_on_the_way_has_a_hit() -> None:
    """Neither was in VRAM when it was acquired, and only one load is made."""
    with World(vram=4) as world:
        world.loader.publish("acme/a", 3)
        leases = [world.acquire("acme/a") for _ in range(3)]
        world.settle()
        assert all(lease.ready for lease in leases)
        found = world.cache.statistics()
        assert (found.hits, found.misses, found.host_hits) == (2, 1, 0)


def test_a_copy_of_the_counts_stays_as_it_is() -> None:
    with World() as world:
        world.loader.publish("acme/a", 3)
        world.ready("acme/a")
        loads = world.cache._stager.loads
        before = loads.copy()
        assert isinstance(before, Loads)
        assert (before.copied_bytes, dict(before.origins)) == (loads.copied_bytes, dict(loads.origins))
        assert before.seconds == loads.seconds
        loads.copied_bytes += 1
        loads.origins[Origin.HOST] += 1
        loads.seconds["cold"]["copy"] += 1.0
        assert before.copied_bytes == pages(3)
        assert before.origins[Origin.HOST] == 0
        assert before.seconds != loads.seconds


def test_each_part_of_what_waited_for_room_gets_its_own_bytes() -> None:
    with World(vram=5) as world:
        for name, size in (("a", 2), ("b", 3), ("c", 5)):
            world.loader.publish(f"acme/{name}", size)
        holder = world.ready("acme/c")
        lease = world.acquire([("acme/a", 1.0), ("acme/b", 1.0)])
        world.settle()
        assert lease.record.parked
        holder.release()
        world.settle()
        world.step(lease)
        world.settle()
        assert world.violations == []


def test_a_lease_that_others_bring_the_bytes_for_lets_go_of_what_it_had_asked_for() -> None:
    for seed in range(10):
        with World(vram=4, host=8, keep_host=False, seed=seed, shuffle_jobs=True) as world:
            world.loader.publish("acme/a", 3)
            leases = [world.acquire("acme/a") for _ in range(4)]
            world.settle()
            assert all(lease.ready for lease in leases)
            assert world.host_free == 8


def test_what_is_in_vram_already_is_not_brought_again_with_the_rest() -> None:
    with World(vram=5, keep_host=False) as world:
        world.loader.publish("acme/a", 3), world.loader.publish("acme/b", 2)
        world.ready("acme/a").release()
        world.loader.calls.clear()
        lease = world.ready([("acme/a", 1.0), ("acme/b", 1.0)])
        assert [call for call in world.loader.calls if call.startswith("fill")] == ["fill acme/b"]
        assert world.copied == 5
        world.step(lease)
        world.settle()
        assert world.violations == []
