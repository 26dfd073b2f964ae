"""Who waits for room in VRAM, and who gets it."""

from __future__ import annotations

from adapterd.gpu_cache import LeaseState, TenantBudget
from fakes.cache_world import World, pages, shares


def test_when_everything_is_pinned_a_lease_waits() -> None:
    with World(vram=4) as world:
        for name in "abc":
            world.loader.publish(f"acme/{name}", 2)
        held, other = world.ready("acme/a"), world.ready("acme/b")
        waiting = world.acquire("acme/c")
        world.settle()
        assert not waiting.ready
        assert not waiting.failed
        assert world.cache.statistics().leases[LeaseState.WAITING] == 1
        other.release()
        world.settle()
        assert waiting.ready
        assert held.ready


def test_a_large_adapter_is_not_starved_by_small_ones() -> None:
    with World(vram=4) as world:
        world.loader.publish("acme/large", 4)
        for name in "abcd":
            world.loader.publish(f"acme/{name}", 1)
        first = world.ready("acme/a")
        large = world.acquire("acme/large")
        world.settle()
        late = world.acquire("acme/b")
        world.settle()
        assert not late.ready  # there is room for it, but the large one was first
        first.release()
        world.settle()
        assert large.ready
        large.release()
        world.settle()
        assert late.ready


def test_another_tenant_is_not_held_up() -> None:
    with World(vram=4) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/large", 4), world.loader.publish("blue/b", 2)
        held, waiting = world.ready("acme/a"), world.acquire("acme/large")
        world.settle()
        assert not waiting.ready
        assert world.ready("blue/b").ready
        assert held.ready


def test_compositions_do_not_block_each_other_by_holding_halves() -> None:
    with World(vram=4) as world:
        for name in "abcd":
            world.loader.publish(f"acme/{name}", 2)
        world.ready("acme/a").release()
        world.ready("acme/c").release()
        first = world.acquire([("acme/a", 1.0), ("acme/b", 1.0)])
        second = world.acquire([("acme/c", 1.0), ("acme/d", 1.0)])
        world.settle()
        assert first.ready
        assert not second.ready
        first.release()
        world.settle()
        assert second.ready


def test_a_guaranteed_share_survives_another_tenants_churn() -> None:
    with World(vram=8, host=64, tenants=shares(blue=4)) as world:
        world.loader.publish("blue/b", 4)
        world.ready("blue/b").release()
        for index in range(10):
            world.loader.publish(f"acme/a{index}", 2)
            world.ready(f"acme/a{index}").release()
        assert world.cache.statistics().vram_bytes == {"blue": pages(4), "acme": pages(4)}
        before = world.cache.statistics().hits
        assert world.ready("blue/b").ready
        assert world.cache.statistics().hits == before + 1


def test_at_its_maximum_a_tenant_drives_out_its_own_though_others_are_unused_for_longer() -> None:
    with World(vram=6, host=12, tenants={"acme": TenantBudget(max_vram_bytes=pages(2))}) as world:
        for name in ("blue/b", "acme/a", "acme/c"):
            world.loader.publish(name, 2)
            world.ready(name).release()
        assert world.cache.statistics().vram_bytes == {"blue": pages(2), "acme": pages(2)}
        world.loader.publish("core/d", 4)
        world.ready("core/d").release()
        assert world.cache.statistics().vram_bytes == {"acme": pages(2), "core": pages(4)}


def test_slots_run_out_like_pages() -> None:
    with World(vram=8, max_residents=2) as world:
        for name in "abc":
            world.loader.publish(f"acme/{name}")
        held, other = world.ready("acme/a"), world.ready("acme/b")
        waiting = world.acquire("acme/c")
        world.settle()
        assert not waiting.ready
        other.release()
        world.settle()
        assert waiting.ready
        assert held.ready


def test_what_lands_for_nobody_makes_room_for_who_waits() -> None:
    """Its lease went while the copy was under way; nothing else happens that would have it noticed."""
    with World(vram=2) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        gone, waiting = world.acquire("acme/a"), world.acquire("acme/b")
        world.pool.run_all()
        world.pump()
        gone.release()
        world.pump()
        assert world.cache.statistics().leases[LeaseState.WAITING] == 1
        while world.device.run(100):
            pass
        world.pump()
        assert world.cache.statistics().leases[LeaseState.WAITING] == 0
        world.settle()
        assert waiting.ready


def test_who_waits_for_room_alone_is_verified_again_without_its_bytes() -> None:
    """It has let go of them: they are asked for when there is room, and not whenever trust changes."""
    with World(vram=2, host=4, keep_host=False) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        held, waiting = world.ready("acme/a"), world.acquire("acme/b")
        world.settle()
        world.loader.calls.clear()
        world.loader.trust_changes += 1
        world.ready("acme/a").release()  # whoever lets go has the others try
        assert "prepare acme/b" in world.loader.calls
        assert "fill acme/b" not in world.loader.calls
        held.release()
        world.settle()
        assert waiting.ready
