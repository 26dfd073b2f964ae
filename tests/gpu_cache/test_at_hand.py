"""What the host has at hand: a lease on it is on its way when `acquire` returns, and nothing is taken for granted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from adapterd.gpu_cache import LeaseState
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import AtHand, Origin
from adapterd.gpu_cache.host.tier import PlainSlab
from adapterd.gpu_cache.revocation import Revocation
from adapterd.loader.errors import Code
from fakes.adapters import PAGE_BYTES, wrong_pages
from fakes.at_hand import in_host_memory, second_cache, state
from fakes.cache_world import World


@pytest.mark.parametrize("together", [False, True])
def test_copies_are_issued_before_acquire_returns_and_nobody_is_asked(together: bool) -> None:
    with World() as world:
        versions = [in_host_memory(world, f"acme/{name}") for name in "ab"[: 1 + together]]
        before = world.copied
        lease = world.acquire([(v.pinned, 0.5) for v in versions] if together else versions[0].pinned)
        assert not world.pool.busy
        assert state(lease) is LeaseState.COPYING
        assert world.copied == before + 2 * len(versions)
        world.device.drain()
        world.pump()
        assert lease.ready
        assert [wrong_pages(world.cache.arena, each) for each, _ in lease.composition] == [[]] * len(versions)
        assert world.cache.statistics().origins[Origin.HOST] == len(versions)
        assert world.loader.calls == []


def test_an_alias_needs_one_answer() -> None:
    with World() as world:
        in_host_memory(world, "acme/a")
        lease = world.acquire("acme/a")
        world.pool.run_one()
        assert not world.pool.busy
        assert state(lease) is LeaseState.COPYING
        assert world.loader.calls == ["resolve acme/a"]


def test_what_is_held_for_copies_stays_until_they_have_landed() -> None:
    with World(host=4) as world:
        version, other = in_host_memory(world, "acme/a"), world.loader.publish("acme/b", 4)
        lease = world.acquire(version.pinned)
        waiting = world.acquire(other.pinned)
        world.pool.run_all()
        assert "fill acme/b" not in world.loader.calls
        world.settle()
        assert wrong_pages(world.cache.arena, lease.composition[0][0]) == []
        assert waiting.ready


def test_after_a_change_of_trust_it_is_verified_first() -> None:
    with World() as world:
        version = in_host_memory(world, "acme/a")
        world.loader.trust_changes += 1
        lease = world.acquire(version.pinned)
        assert state(lease) in {LeaseState.RESOLVING, LeaseState.WAITING}
        assert world.copied == 2  # those of the first time
        world.settle()
        assert lease.ready
        assert world.loader.calls == ["prepare acme/a"]


@pytest.mark.parametrize("name", ["acme/b", "blue/a"])
def test_the_same_digest_under_a_name_that_was_not_verified_is_not_at_hand(name: str) -> None:
    with World() as world:
        version = in_host_memory(world, "acme/a")
        lease = world.acquire(f"{name}@sha256:{version.digest}")
        world.settle()
        assert lease.problem is not None
        assert lease.problem.code is Code.NOT_FOUND
        assert world.copied == 2


def test_a_key_that_was_revoked_here_counts_whoever_had_it_verified() -> None:
    """Workers share a host: what another one had verified may be refused here."""
    with World() as world:
        version = in_host_memory(world, "acme/a", publisher="k1")
        with second_cache(world) as second:
            second.revoke(Revocation("acme", key_id="k1"))
            lease = second.acquire(version.pinned, tenant="acme")
            assert lease.problem is not None
            assert lease.problem.code is Code.VERSION_REVOKED
            world.cache._host.forget(version.resolved.key)
            assert world.host_free == 16, "the refused lease holds nothing"


@pytest.mark.parametrize("key", ["k1", "k2"])
def test_the_same_bytes_under_two_names_are_two_claims(key: str) -> None:
    with World() as world:
        first = world.loader.publish("acme/a", 2, publisher="k1")
        second = in_host_memory(world, "acme/b", digest=first.digest, publisher="k2")
        world.ready("acme/a").release()
        both = [(first.pinned, 0.5), (second.pinned, 0.25)]
        with second_cache(world) as trusting, second_cache(world) as strict:
            assert state(trusting.acquire(both, tenant="acme")) is LeaseState.COPYING
            strict.revoke(Revocation("acme", key_id=key))
            refused = strict.acquire(both, tenant="acme")
            assert refused.problem is not None
            assert refused.problem.code is Code.VERSION_REVOKED


def test_what_is_in_vram_need_not_be_in_host_memory() -> None:
    with World(vram=8, host=4, keep_host=True) as world:
        world.loader.publish("acme/a", 2)
        kept = world.ready("acme/a")
        in_host_memory(world, "acme/b")
        world.cache._host.forget(kept.composition[0][0].key)
        lease = world.acquire([("acme/a", 0.5), ("acme/b", 0.5)])
        world.pool.run_one()
        assert state(lease) is LeaseState.COPYING
        assert not world.pool.busy
        world.settle()
        assert [wrong_pages(world.cache.arena, each) for each, _ in lease.composition] == [[], []]


def test_where_there_is_no_room_nothing_is_held_and_nobody_is_overtaken() -> None:
    with World(vram=2, host=8) as world:
        first, second = in_host_memory(world, "acme/a"), in_host_memory(world, "acme/b")
        world.loader.publish("acme/c", 2)
        held = world.ready("acme/c")
        waiting = [world.acquire(first.pinned), world.acquire(second.pinned)]
        assert [state(lease) for lease in waiting] == [LeaseState.WAITING] * 2
        world.cache._host.forget(first.resolved.key)
        assert world.host_free == 4
        held.release()
        world.settle()
        assert [lease.ready for lease in waiting] == [True, False]
        waiting[0].release()
        world.settle()
        assert waiting[1].ready
        assert wrong_pages(world.cache.arena, waiting[1].composition[0][0]) == []


def test_a_prefetch_into_host_memory_takes_no_room() -> None:
    with World() as world:
        version = in_host_memory(world, "acme/a")
        world.cache.prefetch(version.pinned, tenant="acme", to="host")
        world.settle()
        assert world.vram_free == 8
        assert not world.cache.statistics().leases[LeaseState.WAITING]


def test_a_lease_that_is_resumed_finds_it_again() -> None:
    with World() as world:
        in_host_memory(world, "acme/a")
        lease = world.ready("acme/a")
        lease.pause()
        with world.cache._lock:
            (entry,) = world.cache._stager.entries.values()
            world.cache._stager.shelf.evict(entry)
        lease.resume()
        assert not world.pool.busy
        assert state(lease) is LeaseState.COPYING
        world.settle()
        assert lease.ready


class _Distant(HostCache):
    """A host that has to be asked, as one in another process is; keeps what it was asked."""

    asked: ClassVar[list[str]] = []

    def resolve(self, *args: Any, **options: Any) -> int:
        self.asked.append("resolve")
        return super().resolve(*args, **options)

    def verify(self, *args: Any, **options: Any) -> int:
        self.asked.append("verify")
        return super().verify(*args, **options)

    def fetch(self, *args: Any, **options: Any) -> int:
        self.asked.append("fetch")
        return super().fetch(*args, **options)

    def at_hand(self, *args: Any, **options: Any) -> None:
        return None


def test_a_distant_host_is_asked_once_for_what_it_still_has() -> None:
    with World(host_kind=_Distant) as world:
        version = in_host_memory(world, "acme/a", publisher="k1")
        for wish, asked in ((version.pinned, ["fetch"]), ("acme/a", ["resolve"])):
            _Distant.asked.clear()
            lease = world.ready(wish)
            assert _Distant.asked == asked
            assert wrong_pages(world.cache.arena, lease.composition[0][0]) == []
            lease.release()


@pytest.mark.parametrize("what", ["trust", "revocation", "forgotten", "reload"])
def test_what_is_remembered_counts_until_anything_may_have_changed(what: str) -> None:
    with World(host_kind=_Distant) as world:
        version, other = in_host_memory(world, "acme/a", publisher="k1"), world.loader.publish("acme/b")
        _Distant.asked.clear()
        if what == "trust":
            world.loader.trust_changes += 1
        elif what == "revocation":
            world.cache.revoke(Revocation("acme", digest=other.digest))
        elif what == "forgotten":
            world.cache._host.forget(version.resolved.key)
        else:
            world.cache.rebind(world.cache.base)
        lease = world.ready(version.pinned)
        assert wrong_pages(world.cache.arena, lease.composition[0][0]) == []
        assert ("resolve" if what == "forgotten" else "verify") in _Distant.asked


def test_what_was_in_vram_at_a_reload_is_verified_for_the_new_base() -> None:
    with World(host_kind=_Distant) as world:
        version = world.loader.publish("acme/a", 2)
        world.ready("acme/a").release()
        _Distant.asked.clear()
        world.cache.rebind(world.cache.base)
        assert wrong_pages(world.cache.arena, world.ready(version.pinned).composition[0][0]) == []
        assert _Distant.asked == ["resolve", "verify", "fetch"]


def test_a_key_that_is_revoked_later_finds_what_was_remembered() -> None:
    with World(host_kind=_Distant) as world:
        version = in_host_memory(world, "acme/a", publisher="k1")
        world.cache._stager.ledger._known.clear()  # it forgets what is nowhere here
        lease = world.ready(version.pinned)
        world.cache.revoke(Revocation("acme", key_id="k1"))
        assert lease.problem is not None
        assert lease.problem.code is Code.VERSION_REVOKED


class _Moved(HostCache):
    """What it has at hand is in memory that the device does not know yet."""

    def at_hand(self, *args: Any, **options: Any) -> AtHand | None:
        here = super().at_hand(*args, **options)
        slab = PlainSlab(memoryview(bytearray(16 * PAGE_BYTES)), PAGE_BYTES)
        return here and replace(here, images=tuple(replace(image, slab=slab) for image in here.images))


def test_memory_that_the_device_does_not_know_is_left_to_a_thread_that_may_adopt_it() -> None:
    with World(host_kind=_Moved) as world:
        version = in_host_memory(world, "acme/a")
        lease = world.ready(version.pinned)
        assert wrong_pages(world.cache.arena, lease.composition[0][0]) == []
        world.cache._host.forget(version.resolved.key)
        assert world.host_free == 16, "what was at hand is held no more"
