"""The seam between the cache and its host: who holds host memory when, in which order room is handed out, counts."""

from __future__ import annotations

import pytest

from adapterd.gpu_cache import AdapterCache, CacheConfig, LeaseState, TenantBudget
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import Origin
from adapterd.gpu_cache.host.tier import PlainSlab
from adapterd.gpu_cache.slabs import DeviceSlab, SlabTensors
from adapterd.gpu_cache.vram_tier import Cause
from adapterd.loader.errors import Code, reject
from fakes.adapters import PAGE_BYTES, ManualPool, MemoryLoader, make_base, wrong_pages
from fakes.cache_world import World, pages
from fakes.devices import SimulatedDevice

# Host memory


def test_who_waits_for_vram_holds_no_host_memory() -> None:
    """Else a lease that waits for VRAM and one that waits for host memory could wait for each other."""
    with World(vram=4, host=4) as world:
        for name, size in (("held", 3), ("waits", 4), ("other", 4)):
            world.loader.publish(f"acme/{name}", size)
        held = world.ready("acme/held")
        waiting = [world.acquire("acme/waits"), world.acquire("acme/other")]
        world.settle()
        assert world.loader.calls.count("fill acme/waits") == 1
        assert world.loader.calls.count("fill acme/other") == 1  # it had the slab for its own meanwhile
        held.release()
        for lease in waiting:
            world.settle()
            assert lease.ready
            assert wrong_pages(world.cache.arena, lease.composition[0][0]) == []
            lease.release()


def test_a_lease_that_waited_for_room_is_served_from_host_memory() -> None:
    with World(vram=2, host=8) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        held, waiting = world.ready("acme/a"), world.acquire("acme/b")
        world.settle()
        world.loader.calls.clear()
        held.release()
        world.settle()
        assert waiting.ready
        assert world.loader.calls == []
        statistics = world.cache.statistics()
        assert statistics.loads[Origin.SOURCE] == 2  # where the bytes came from, though they rested on the way
        assert statistics.misses == 2


def test_host_memory_is_held_until_the_copy_has_landed() -> None:
    with World(vram=4, host=2) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        first, second = world.acquire("acme/a"), world.acquire("acme/b")
        world.pool.run_all()
        assert first.record.state is LeaseState.COPYING
        first.release()
        world.cache.pump()  # enqueues the copy, which has not read the slab yet
        world.pool.run_all()
        assert "fill acme/b" not in world.loader.calls
        world.settle()
        assert second.ready
        assert wrong_pages(world.cache.arena, second.composition[0][0]) == []


@pytest.mark.parametrize("jobs", range(8))
@pytest.mark.parametrize("how", ["release", "reload"])
def test_room_that_waits_for_its_bytes_is_given_back_with_the_lease(jobs: int, how: str) -> None:
    with World(vram=4, host=4) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2), world.loader.publish("acme/c", 3)
        held = world.ready("acme/a")
        waiting = world.acquire([("acme/b", 1.0), ("acme/a", 0.5)])
        second = world.acquire([("acme/c", 1.0)])
        for _ in range(jobs):
            world.pool.run_one()
        held.release()
        if how == "reload":
            world.cache.rebind(make_base("b" * 40))
        waiting.release()
        second.release()
        world.settle()
        assert world.cache.statistics().steps_in_flight == 0
        world.cache.rebind(world.cache.base)
        world.settle()
        assert (world.vram_free, world.host_free) == (4, 4)


def test_bytes_that_went_bad_while_a_lease_waited_for_room_fail_it_and_free_the_room() -> None:
    with World(vram=2, host=2) as world:
        for name in "abc":
            world.loader.publish(f"acme/{name}", 2)
        held, waiting = world.ready("acme/a"), world.acquire("acme/b")
        world.settle()
        behind = world.acquire("acme/c")  # takes b's place in the slab
        world.settle()
        world.loader.failures["fill acme/b"] = reject(Code.CHUNK_MISMATCH, "weights", "chunk 3")
        held.release()
        world.settle()
        assert waiting.problem is not None
        assert waiting.problem.code is Code.CHUNK_MISMATCH
        assert behind.ready


def test_a_version_too_large_for_the_slab_fails_with_the_numbers() -> None:
    with World(vram=8, host=2) as world:
        world.loader.publish("acme/a", 3)
        lease = world.acquire("acme/a")
        world.settle()
        assert lease.problem is not None
        assert lease.problem.code is Code.BUDGET_EXCEEDED
        assert f"{pages(3)} bytes" in lease.problem.message
        assert f"{pages(2)}" in lease.problem.message


def test_a_slab_of_another_kind_is_adopted_once() -> None:
    device, loader, pool = SimulatedDevice(), MemoryLoader(), ManualPool()
    slab = PlainSlab(memoryview(bytearray(pages(8))), PAGE_BYTES)
    host = HostCache(slab, loader.base, loader=loader, pool=pool, answers=pool)
    config = CacheConfig(vram_bytes=pages(8), host_bytes=pages(8), page_bytes=PAGE_BYTES)
    with AdapterCache(config, base=loader.base, host=host, device=device) as cache:
        for name in "ab":
            loader.publish(f"acme/{name}", 3)
            lease = cache.acquire(f"acme/{name}", tenant="acme")
            while not lease.ready:
                pool.run_one()
                cache.pump()
                device.run(10)
            assert wrong_pages(cache.arena, lease.composition[0][0]) == []
    device.drain()


def test_a_slab_that_is_used_no_more_is_given_back_when_a_newer_one_comes() -> None:
    device = SimulatedDevice()
    old, new, newest = (PlainSlab(memoryview(bytearray(pages(2))), PAGE_BYTES) for _ in range(3))
    tensors = SlabTensors(device, old)
    tensors.adopt(DeviceSlab(device.allocate_host(pages(1)), PAGE_BYTES))
    tensors.use(old, 1)
    tensors.adopt(new)
    tensors.adopt(new)
    assert tensors.tensor(old).numel() == pages(2)
    tensors.use(old, -1)
    tensors.adopt(newest)
    for gone in (old, new):
        with pytest.raises(KeyError):
            tensors.tensor(gone)
    assert tensors.tensor(newest).numel() == pages(2)


# Order


def test_the_higher_priority_gets_room_first_then_the_older() -> None:
    with World(vram=2) as world:
        for name in "abcd":
            world.loader.publish(f"acme/{name}", 2)
        held = world.ready("acme/a")
        waiting = {
            "b": world.acquire("acme/b"), "c": world.acquire("acme/c"),
            "d": world.acquire("acme/d", priority=1),
        }  # fmt: skip
        world.settle()
        for name in "dbc":
            assert not any(lease.ready for lease in waiting.values())
            held.release()
            world.settle()
            held = waiting.pop(name)
            assert held.ready, name


def test_a_tenant_with_too_many_leases_waiting_is_refused_and_others_are_not() -> None:
    with World(tenants={"acme": TenantBudget(max_waiting=2)}) as world:
        resident = world.loader.publish("acme/r")
        for name in ("acme/a", "acme/b", "acme/c", "blue/d"):
            world.loader.publish(name)
        world.ready("acme/r").release()
        waiting = [world.acquire("acme/a"), world.acquire("acme/b")]
        refused = world.acquire("acme/c")
        assert refused.problem is not None
        assert refused.problem.code is Code.QUEUE_FULL
        assert world.acquire(resident.pinned).ready  # waits for nothing
        assert world.acquire(None, "acme").ready
        other = world.acquire("blue/d")
        world.settle()
        assert all(lease.ready for lease in (*waiting, other))
        assert world.ready("acme/c").ready


def test_ten_thousand_leases_at_once_are_all_served() -> None:
    with World(vram=8, host=16) as world:
        for index in range(8):
            world.loader.publish(f"acme/a{index}")
        leases = [world.acquire(f"acme/a{index % 8}") for index in range(10_000)]
        refused = world.acquire("acme/a0")
        assert refused.problem is not None
        assert refused.problem.code is Code.QUEUE_FULL
        world.settle()
        assert all(lease.ready for lease in leases)
        assert sum(call.startswith("fill") for call in world.loader.calls) == 8
        for lease in leases:
            lease.release()
        assert world.cache.statistics().leases[LeaseState.RELEASED] == 10_000


# Counts


def test_what_is_counted_about_loads_and_evictions() -> None:
    with World(vram=2, host=4) as world:
        for name in "abc":
            world.loader.publish(f"acme/{name}", 2)
            world.ready(f"acme/{name}").release()
        world.ready("acme/c").release()  # in VRAM
        world.ready("acme/b").release()  # in host memory
        world.ready("acme/a").release()  # gave way in both: on the disk
        world.cache.rebind(world.cache.base)
        world.settle()
        statistics = world.cache.statistics()
        assert (statistics.hits, statistics.host_hits, statistics.misses) == (1, 1, 4)
        found = {Origin.SOURCE: 3, Origin.DISK: 1, Origin.HOST: 1, Origin.PACKED: 0}
        assert statistics.origins == statistics.loads == found
        assert statistics.evictions == {Cause.ROOM: 4, Cause.RELOAD: 1, Cause.REVOKED: 0, Cause.ASKED: 0}
        assert set(statistics.load_seconds["cold"]) == {"verify", "pack", "copy"}
        assert set(statistics.load_seconds["steady"]) == {"copy"}
