"""A revocation while bytes are read or copied: steps finish, copies stop, and pages are zeroed behind both."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from adapterd.gpu_cache.device import Stream
from adapterd.gpu_cache.events import KeyRevoked
from adapterd.gpu_cache.records import Cause
from adapterd.gpu_cache.residency import LEAST_LIMIT
from adapterd.gpu_cache.revocation import Revocation
from adapterd.loader.errors import Code, error
from fakes.adapters import make_base, tag
from fakes.cache_world import World
from fakes.devices import DefectiveDevice, SimulatedDevice
from fakes.revoking import code_of, revoke, zeros


def test_steps_in_flight_finish_and_the_pages_are_zeroed_right_behind_them() -> None:
    with World(vram=4, pages_per_step=1) as world:
        version = world.loader.publish("acme/a", 3)
        lease = world.ready("acme/a")
        resident = lease.composition[0][0]
        first, second = world.cache.begin_step([lease]), world.cache.begin_step([lease])
        world.launch_check(resident)
        revoke(world, version)
        world.settle()
        assert world.vram_free == 1
        first.end()
        world.settle()
        assert world.vram_free == 1
        world.launch_check(resident)
        second.end()
        assert world.vram_free == 4  # the zeroing is enqueued, nothing has to come
        world.device.drain()
        assert world.violations == []
        assert zeros(world, resident.pages)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("early", [False, True])
def test_zeroing_waits_for_readers_and_writers_and_the_next_owner_for_the_zeroing(seed: int, early: bool) -> None:
    """With early marks only waits protect what stands behind them; those of copies guard host memory, too."""
    defect = partial(DefectiveDevice, early_marks_of=("compute", "copy-3"))
    with World(vram=3, host=20, seed=seed, defect=defect if early else None) as world:
        chosen = random.Random(seed)
        for index in range(6):
            version = world.loader.publish(f"acme/a{index}", 3)
            lease = world.acquire(f"acme/a{index}")
            while not lease.ready:
                world.pool.run_one()
                world.pump()
                world.device.run(1)
            world.step(lease)
            revoke(world, version)
            world.device.run(chosen.randrange(6))
        world.device.drain()
        assert world.violations == []


@pytest.mark.parametrize("drop", [("copy-3",), ("copy-1", "copy-2")])
def test_a_missing_wait_would_be_noticed(drop: tuple[str, ...]) -> None:
    """The zeroing (`copy-3`) waits for the readers, and the copies of the next owner for the zeroing."""

    def seen(seed: int) -> bool:
        with World(vram=2, seed=seed, defect=lambda d: DefectiveDevice(d, drop_waits_of=drop)) as world:
            version, second = world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
            world.step(world.ready(version.pinned))
            revoke(world, version)
            lease = world.acquire(second.pinned)
            while not lease.ready:
                world.pool.run_one()
                world.pump()
                world.device.run(1)
            world.step(lease)
            world.device.drain()
            return bool(world.violations)

    assert any(seen(seed) for seed in range(40))


@pytest.mark.parametrize("jobs", range(7))
@pytest.mark.parametrize("work", [0, 2])
def test_revoked_at_any_moment_of_a_load_nothing_of_it_stays(jobs: int, work: int) -> None:
    with World(vram=6, host=8, pages_per_step=1) as world:
        version = world.loader.publish("acme/a", 3)
        other = world.loader.publish("blue/b", 3)
        world.ready("blue/b").release()
        lease = world.acquire("acme/a")
        for _ in range(jobs):
            world.pool.run_one()
        with world.cache.begin_step([None]):  # so that copies are issued page by page
            pass
        world.device.run(work)
        revoke(world, version)
        world.settle()
        assert code_of(lease) is Code.VERSION_REVOKED
        assert world.vram_free == 3
        assert [row.digest for row in world.cache.residency()] == [other.digest]
        words = {int(v) for v in world.cache.arena.view(torch.int64).unique()}
        assert not words & {tag(version.digest, page) for page in range(3)}
        world.step(world.ready(other.pinned))
        world.settle()
        assert world.violations == []


def test_a_copy_under_way_is_stopped() -> None:
    with World(vram=8, pages_per_step=2) as world:
        version = world.loader.publish("acme/a", 8)
        base = world.acquire(None)
        lease = world.acquire("acme/a")
        with world.cache.begin_step([base]):
            world.pool.run_all()
        copied = world.copied
        assert 0 < copied < 8
        revoke(world, version)
        with world.cache.begin_step([base]):
            pass
        world.settle()
        assert world.copied == copied
        assert world.vram_free == 8
        assert code_of(lease) is Code.VERSION_REVOKED
        assert zeros(world, tuple(range(8)))


def test_two_copies_under_way_are_stopped_one_after_the_other() -> None:
    with World(vram=8, pages_per_step=2) as world:
        versions = [world.loader.publish(f"{tenant}/a", 4) for tenant in ("acme", "blue")]
        base = world.acquire(None)
        leases = [world.acquire(version.pinned) for version in versions]
        with world.cache.begin_step([base]):
            world.pool.run_all()
        copied = world.copied
        assert copied < 4
        for version in versions:
            revoke(world, version)
        with world.cache.begin_step([base]):
            pass
        world.settle()
        assert world.copied == copied
        assert world.vram_free == 8
        assert all(lease.failed for lease in leases)


@pytest.mark.parametrize("steps", [0, 3])
def test_pages_that_a_stopped_copy_never_wrote_wait_for_their_last_readers_all_the_same(steps: int) -> None:
    """Steps of base rows issue what is queued, while the kernel that reads the pages has not run yet."""
    for seed in range(20):
        with World(vram=4, seed=seed, pages_per_step=1) as world:
            first, second = world.loader.publish("acme/a", 4), world.loader.publish("acme/b", 4)
            lease = world.ready(first.pinned)
            ticket = world.cache.begin_step([lease])
            world.launch_check(lease.composition[0][0])
            lease.release()
            ticket.end()
            world.acquire(second.pinned)
            world.pool.run_all()  # it has the room; its copies are not enqueued
            revoke(world, second)
            world.pump()
            for _ in range(steps):
                world.step()
            world.device.drain()
            world.settle()
            assert world.violations == []
            assert world.vram_free == 4


def test_what_is_still_to_be_zeroed_makes_no_room_for_those_who_wait() -> None:
    with World(vram=4) as world:
        version = world.loader.publish("acme/a", 4)
        world.loader.publish("acme/b", 4)
        held, waiting = world.ready("acme/a"), world.acquire("acme/b")
        world.settle()
        assert not waiting.ready
        revoke(world, version)
        assert held.failed
        world.settle()
        assert world.zeroed == 4
        world.step(waiting)
        world.settle()
        assert world.violations == []


def test_only_its_own_pages_are_zeroed_wherever_they_lie() -> None:
    with World(vram=4) as world:
        for name in ("a0", "a1", "a2", "a3"):
            world.loader.publish(f"acme/{name}")
        leases = [world.ready(f"acme/{name}") for name in ("a0", "a1", "a2", "a3")]
        for lease, name in ((leases[0], "a0"), (leases[2], "a2")):
            lease.release()
            world.cache.evict(f"acme/{name}", tenant="acme")
        version = world.loader.publish("acme/b", 2)
        assert not zeros(world, (0, 2))
        assert sorted(world.ready("acme/b").composition[0][0].pages) == [0, 2]
        revoke(world, version)
        world.settle()
        assert zeros(world, (0, 2))
        world.step(leases[1], leases[3])
        world.settle()
        assert world.violations == []


def test_one_thread_zeroes_at_a_time() -> None:
    """Marks are noted in stream order; who comes while another is at it goes again."""

    class Entered(DefectiveDevice):
        """Another thread comes while something is being zeroed."""

        def __init__(self, inner: SimulatedDevice) -> None:
            super().__init__(inner)
            self.zero = self.enter  # type: ignore[assignment]
            self.inside, self.deepest = 0, 0

        def enter(self, stream: Stream, dst: torch.Tensor) -> None:
            self.inside += 1
            self.deepest = max(self.deepest, self.inside)
            world.cache._stager.scrubber.issue()
            self.inner.zero(stream, dst)
            self.inside -= 1

    with World(vram=4, defect=Entered) as world:
        for name in "ab":
            world.loader.publish(f"acme/{name}", 2, publisher="k1")
            world.ready(f"acme/{name}").release()
        world.cache.heed(KeyRevoked("acme", "k1"))
        assert world.zeroed == 4
        assert world.device.deepest == 1  # type: ignore[union-attr]


def test_what_the_device_refuses_to_zero_is_never_used_again() -> None:
    class Refusing(DefectiveDevice):
        def __init__(self, inner: SimulatedDevice) -> None:
            super().__init__(inner)
            self.zero = self.refuse  # type: ignore[assignment]

        def refuse(self, stream: Stream, dst: torch.Tensor) -> None:
            raise error(Code.DEVICE_ERROR, "simulated", "no")

    with World(vram=4, defect=Refusing) as world:
        version = world.loader.publish("acme/a", 3)
        world.ready("acme/a").release()
        revoke(world, version)
        world.settle()
        assert world.vram_free == 1
        world.loader.publish("acme/b", 2)
        lease = world.acquire("acme/b")
        world.settle()
        assert not lease.ready


@pytest.mark.parametrize("by", ["digest", "adapter", "key_id"])
@pytest.mark.parametrize("reads", [True, False])
def test_what_a_reload_gives_up_is_zeroed_if_it_is_revoked_before_it_is_gone(by: str, reads: bool) -> None:
    """Nobody finds it any more, but a step reads it still, or a copy is under way."""
    with World(vram=4) as world:
        version = world.loader.publish("acme/a", 2, publisher="a-key")
        lease = world.ready("acme/a") if reads else world.acquire("acme/a")
        world.pool.run_all()
        world.pump()
        (entry,) = world.cache._stager.entries.values()
        assert entry.resident is not None
        pages = entry.resident.pages
        ticket = world.cache.begin_step([lease] if reads else [])
        world.cache.rebind(make_base("b" * 40))
        how = {"digest": version.digest, "adapter": "a", "key_id": "a-key"}[by]
        world.cache.revoke(Revocation("acme", **{by: how}))  # type: ignore[arg-type]
        ticket.end()
        world.settle()
        assert world.vram_free == 4
        assert zeros(world, pages)


def test_its_claims_are_known_until_it_is_gone() -> None:
    """However many others are verified meanwhile, so that the books forget who is not here."""
    with World(vram=8, host=8) as world:
        world.loader.publish("acme/a", 2, publisher="a-key")
        lease = world.ready("acme/a")
        pages = lease.composition[0][0].pages
        ticket = world.cache.begin_step([lease])
        new = make_base("b" * 40)
        world.cache.rebind(new)
        world.loader.base = new
        for number in range(LEAST_LIMIT // 2 + 1):
            world.loader.publish(f"acme/other-{number}", 1)
            world.cache.prefetch(f"acme/other-{number}", tenant="acme", to="host")
            world.pool.run_all()
        world.cache.revoke(Revocation("acme", key_id="a-key"))
        ticket.end()
        world.settle()
        assert zeros(world, pages)


def test_what_else_a_reload_gives_up_goes_as_it_would_have() -> None:
    with World(vram=8) as world:
        versions = [world.loader.publish(name, 2) for name in ("acme/a", "acme/b", "blue/c")]
        ticket = world.cache.begin_step([world.ready(version.pinned) for version in versions])
        world.cache.rebind(make_base("b" * 40))
        revoke(world, versions[0])
        ticket.end()
        world.settle()
        assert world.zeroed == 2
        evictions = world.cache.statistics().evictions
        assert (evictions[Cause.REVOKED], evictions[Cause.RELOAD]) == (1, 2)
