"""Aliases that are followed: when a move takes effect, who sees what, and what a canary gets."""

from __future__ import annotations

import threading

import pytest

from adapterd.gpu_cache import Lease, TenantBudget
from adapterd.gpu_cache.events import AliasMoved, KeyRevoked, Quarantined, Released, Yanked
from adapterd.gpu_cache.revocation import Revocation
from adapterd.gpu_cache.routes import Route
from adapterd.loader.errors import AdapterdError, Code, reject
from fakes.adapters import Published, make_base
from fakes.cache_world import World, pages


def routed(world: World, **more: object) -> Route:
    route = world.cache.route("acme/a", tenant="acme", **more)  # type: ignore[arg-type]
    world.settle()
    return route


def digest(lease: Lease) -> str:
    return lease.composition[0][0].key.digest


def moved(world: World) -> None:
    world.cache.heed(AliasMoved("acme", "a", "default"))


def test_a_lease_is_ready_at_once_and_nobody_is_asked() -> None:
    with World() as world:
        version = world.loader.publish("acme/a", 2)
        with routed(world) as route:
            world.loader.publish("acme/a", 2)
            world.loader.calls.clear()
            lease = route.acquire()
            assert lease.ready
            assert digest(lease) == version.digest
            assert world.loader.calls == []
            assert route.state.current == version.digest
            world.step(lease)
        world.settle()
        assert world.violations == []


def test_before_the_first_version_is_there_a_lease_waits() -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        route = world.cache.route("acme/a", tenant="acme")
        lease = route.acquire()
        assert not lease.ready
        world.settle()
        assert digest(lease) == version.digest


def test_a_move_takes_effect_at_a_step_boundary_once_the_new_version_is_there() -> None:
    with World() as world:
        old = world.loader.publish("acme/a", 2)
        route = routed(world)
        first = route.acquire()
        new = world.loader.publish("acme/a", 2)
        moved(world)
        assert digest(route.acquire()) == old.digest
        ticket = world.cache.begin_step([first])
        world.settle()
        ticket.end()  # issues the copies
        ticket = world.cache.begin_step([first])
        world.settle()
        seen = [digest(route.acquire()) for _ in range(3)]
        assert seen == [old.digest] * 3  # it is there, but a step runs
        ticket.end()
        second = route.acquire()
        assert digest(second) == new.digest
        world.step(first, second)  # the old one drains
        world.settle()
        assert world.violations == []


def test_the_current_versions_stay_and_the_old_one_goes_when_room_is_needed() -> None:
    with World(vram=4) as world:
        world.loader.publish("acme/a", 2)
        world.loader.publish("acme/b", 2), world.loader.publish("acme/c", 2)
        route = routed(world)
        for name in ("acme/b", "acme/c", "acme/b"):
            world.ready(name).release()
        assert route.acquire().ready
        new = world.loader.publish("acme/a", 2)
        moved(world)
        world.settle()
        world.ready("acme/c").release()
        lease = route.acquire()
        assert lease.ready
        assert digest(lease) == new.digest
        route.close()
        lease.release()
        world.loader.publish("acme/large", 4)
        assert world.ready("acme/large").ready


@pytest.mark.parametrize("jobs", range(8))
def test_of_two_moves_the_last_one_wins(jobs: int) -> None:
    with World(vram=6) as world:
        world.loader.publish("acme/a", 2)
        route = routed(world)
        world.loader.publish("acme/a", 2)
        moved(world)
        for _ in range(jobs):
            world.pool.run_one()
        world.pump()
        last = world.loader.publish("acme/a", 2)
        moved(world)
        world.settle()
        assert digest(route.acquire()) == last.digest
        assert not route.state.busy


@pytest.mark.parametrize("jobs", range(8))
def test_a_rollback_is_a_move(jobs: int) -> None:
    with World(vram=6) as world:
        old = world.loader.publish("acme/a", 2)
        route = routed(world)
        world.loader.publish("acme/a", 2)
        moved(world)
        for _ in range(jobs):
            world.pool.run_one()
        world.pump()
        world.loader.move(old)
        moved(world)
        world.settle()
        assert digest(route.acquire()) == old.digest
        assert route.problem is None


def test_a_new_version_that_cannot_be_had_leaves_the_old_one_current() -> None:
    with World() as world:
        old = world.loader.publish("acme/a")
        route = routed(world)
        world.loader.publish("acme/a")
        world.loader.failures["fill acme/a"] = reject(Code.CHUNK_MISMATCH, "weights", "chunk 3")
        moved(world)
        world.settle()
        assert digest(route.acquire()) == old.digest
        assert route.problem is not None
        assert route.problem.code is Code.CHUNK_MISMATCH
        del world.loader.failures["fill acme/a"]
        route.refresh()
        world.settle()
        assert route.problem is None
        assert digest(route.acquire()) != old.digest


def test_a_source_that_cannot_be_asked_changes_nothing() -> None:
    with World() as world:
        old = world.loader.publish("acme/a")
        route = routed(world)
        world.loader.failures["resolve acme/a"] = reject(Code.SERVER_UNREACHABLE, "registry", "no answer")
        route.refresh()
        world.settle()
        assert route.problem is not None
        assert digest(route.acquire()) == old.digest


def test_a_new_version_too_large_beside_the_old_one_is_reported() -> None:
    with World(vram=8, tenants={"acme": TenantBudget(max_vram_bytes=pages(4))}) as world:
        old = world.loader.publish("acme/a", 2)
        route = routed(world)
        world.loader.publish("acme/a", 3)
        moved(world)
        world.settle()
        assert route.problem is not None
        assert route.problem.code is Code.BUDGET_EXCEEDED
        assert digest(route.acquire()) == old.digest


def test_it_looks_by_itself_after_a_period() -> None:
    now = [0.0]
    with World() as world:
        world.loader.publish("acme/a")
        route = routed(world, period=10.0, clock=lambda: now[0])
        new = world.loader.publish("acme/a")
        now[0] = 9.0
        world.settle()
        assert digest(route.acquire()) != new.digest
        now[0] = 10.0
        world.settle()
        assert digest(route.acquire()) == new.digest
        world.loader.calls.clear()
        world.settle()
        assert world.loader.calls == []


# What the registry tells


def test_a_yanked_version_is_let_go_of_and_had_by_its_digest() -> None:
    with World() as world:
        old, new = world.loader.publish("acme/a"), world.loader.publish("acme/a")
        route = routed(world)
        held = route.acquire()
        world.loader.move(old)
        world.cache.heed(Yanked("acme", "a", 2, new.digest))
        world.settle()
        assert digest(route.acquire()) == old.digest
        assert held.ready
        assert world.ready(new.pinned).ready
        world.cache.heed(Yanked("blue", "a", 1, old.digest))
        assert route.state.current == old.digest


def test_a_quarantined_version_is_refused_until_it_is_released() -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        route = routed(world)
        held = route.acquire()
        for _ in range(2):
            world.cache.heed(Quarantined("acme", "a", 1, version.digest))
        assert held.failed
        world.settle()
        assert route.problem is not None
        assert route.problem.code is Code.VERSION_REVOKED
        lease = route.acquire()
        world.settle()
        assert lease.problem is not None
        assert lease.problem.code is Code.VERSION_REVOKED
        for _ in range(2):
            world.cache.heed(Released("acme", "a", 1, version.digest))
        route.refresh()
        world.settle()
        assert route.acquire().ready
        assert route.problem is None


def test_when_the_current_version_is_revoked_the_alias_is_looked_up_again() -> None:
    with World() as world:
        old = world.loader.publish("acme/a", publisher="k1")
        route = routed(world)
        new = world.loader.publish("acme/a", publisher="k2")
        world.cache.heed(KeyRevoked("acme", "k1"))
        world.settle()
        assert digest(route.acquire()) == new.digest != old.digest


def test_a_reload_of_the_base_brings_the_alias_anew() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        route = routed(world)
        base = make_base("b" * 40)
        world.loader.base = base
        new = world.loader.publish("acme/a")
        world.cache.rebind(base)
        world.settle()
        assert digest(route.acquire()) == new.digest


def test_a_drain_lets_go_and_its_end_brings_back() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        route = routed(world)
        world.cache.drain(True)
        assert world.cache.drained
        refused = route.acquire()
        assert refused.problem is not None
        assert refused.problem.code is Code.CACHE_DRAINING
        refused.release()
        world.settle()
        assert world.cache.drained
        world.cache.drain(False)
        world.settle()
        assert route.acquire().ready


def test_another_tenants_alias_is_unknown() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        route = world.cache.route("acme/a", tenant="blue")
        world.settle()
        assert route.problem is not None
        assert route.problem.code is Code.NOT_FOUND
        assert world.loader.calls == []


def test_after_closing_it_holds_nothing_and_changes_nothing() -> None:
    with World(vram=2) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        route = routed(world)
        route.close()
        route.close()
        route.refresh()
        world.settle()
        assert world.ready("acme/b").ready
    with pytest.raises(AdapterdError) as closed:
        route.acquire()
    assert closed.value.code is Code.CACHE_CLOSED


# Canaries


def canaried(world: World, share: float) -> tuple[Route, Published, Published]:
    stable = world.loader.publish("acme/a")
    canary = world.loader.publish("acme/a", alias="canary")
    return routed(world, canary=("acme/a:canary", share)), stable, canary


def test_a_share_of_keys_gets_the_canary_and_each_key_stays_on_its_side() -> None:
    with World() as world:
        route, stable, canary = canaried(world, 0.25)
        first = {key: digest(route.acquire(key)) for key in map(str, range(400))}
        assert 60 < sum(d == canary.digest for d in first.values()) < 140
        assert {digest(route.acquire(key.encode())) == d for key, d in first.items()} == {True}
        wider = world.cache.route("acme/a", tenant="acme", canary=("acme/a:canary", 0.5))
        world.settle()
        second = {key: digest(wider.acquire(key)) for key in first}
        assert all(second[key] == canary.digest for key, d in first.items() if d == canary.digest)
        assert route.state.canary == canary.digest
        assert route.state.current == stable.digest


@pytest.mark.parametrize(("share", "wanted"), [(0.0, 0), (0.25, 10), (1.0, 40)])
def test_without_a_key_the_sides_take_turns(share: float, wanted: int) -> None:
    with World() as world:
        route, _, canary = canaried(world, share)
        assert sum(digest(route.acquire()) == canary.digest for _ in range(40)) == wanted


def test_a_canary_that_is_not_there_sends_nobody_away() -> None:
    with World() as world:
        route, stable, canary = canaried(world, 1.0)
        world.cache.revoke(Revocation("acme", digest=canary.digest))
        lease = route.acquire("key")
        assert lease.ready
        assert digest(lease) == stable.digest
        assert route.problem is not None


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_between_nothing_and_everything(share: float) -> None:
    with World() as world, pytest.raises(ValueError, match="share"):
        world.cache.route("acme/a", tenant="acme", canary=("acme/b", share))


def test_threads_acquire_while_the_alias_moves() -> None:
    with World(vram=8) as world:
        versions = {world.loader.publish("acme/a").digest}
        route = routed(world)
        seen: list[str] = []

        def use() -> None:
            for _ in range(100):
                with route.acquire() as lease:
                    seen.append(digest(lease))

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            last = world.loader.publish("acme/a")
            versions.add(last.digest)
            moved(world)
            world.settle()
        for thread in threads:
            thread.join(60)
        assert len(seen) == 400
        assert set(seen) <= versions
        assert digest(route.acquire()) == last.digest
