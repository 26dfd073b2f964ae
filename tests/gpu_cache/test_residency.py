"""The list of what is where, and the ledger of names behind it."""

from __future__ import annotations

import pickle
from dataclasses import fields

import pytest

from adapterd.gpu_cache import AdapterCache, Place
from adapterd.gpu_cache.host.host_cache import HostCache
from adapterd.gpu_cache.host.interface import HostUsage
from adapterd.gpu_cache.residency import LEAST_LIMIT, Ledger
from adapterd.gpu_cache.whereabouts import whereabouts
from adapterd.loader.identity import Ref, VersionKey
from adapterd.loader.manifest import Manifest
from fakes.adapters import PAGE_BYTES, MemoryLoader, make_base
from fakes.cache_world import World


def test_each_version_is_listed_once_at_its_nearest_place() -> None:
    with World(vram=4, host=8) as world:
        here = world.loader.publish("acme/a", 2, rank=8)
        world.loader.publish("acme/b", digest=here.digest)
        there = world.loader.publish("blue/c", 3)
        world.cache.prefetch("blue/c", tenant="blue", to="host")
        world.settle()
        lease = world.ready([("acme/a", 1.0), ("acme/b", 1.0)])
        first, second = world.cache.residency()
        resident = lease.composition[0][0]
        assert (first.tenant, first.digest, first.adapters) == ("acme", here.digest, ("a", "b"))
        assert (first.tier, first.bytes, first.rank) == (Place.RESIDENT, 2 * PAGE_BYTES, 8)
        assert (first.slot, first.generation) == (resident.slot, resident.generation)
        assert (first.leases, first.pinned, first.priority) == (1, False, 0)
        assert (second.tenant, second.digest, second.adapters) == ("blue", there.digest, ("c",))
        assert (second.tier, second.bytes, second.slot, second.generation) == (Place.HOST, 3 * PAGE_BYTES, None, None)
        assert second.leases == 0
        before = first.last_used
        world.step(lease)
        assert world.cache.residency()[0].last_used > before


def test_a_version_on_its_way_is_listed_with_who_waits() -> None:
    with World(vram=4) as world:
        world.loader.publish("acme/a", 2)
        other = world.acquire("acme/a", priority=-3)
        lease = world.acquire("acme/a", priority=2)
        assert world.cache.residency() == ()  # nobody knows yet what it is
        world.pool.run_one(), world.pool.run_one(), world.pool.run_one()
        (row,) = world.cache.residency()
        assert (row.tier, row.leases, row.priority) == (Place.ABSENT, 2, 2)
        world.pool.run_all()
        assert world.cache.residency()[0].tier is Place.STAGING
        assert not other.ready
        assert whereabouts(world.cache.residency())["acme", row.digest].nbytes == 2 * PAGE_BYTES
        world.settle()
        assert lease.ready


def test_the_version_of_the_list_grows_when_a_tier_changes_and_only_then() -> None:
    with World(vram=2, host=4) as world:
        first, _ = world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        seen: list[tuple[int, list[tuple[str, Place]]]] = []

        def look() -> None:
            version = world.cache.residency_version
            tiers = [(r.digest, r.tier) for r in world.cache.residency() if r.tier is not Place.ABSENT]
            if seen and seen[-1][1] != tiers:
                assert version > seen[-1][0]
            seen.append((version, tiers))

        def drive() -> None:
            while world.pool.run_one() or world.device.run(1):
                look()
                world.pump()
                look()

        look()
        lease = world.acquire("acme/a")
        drive()
        quiet = world.cache.residency_version
        world.step(lease)
        lease.release()
        world.settle()
        assert world.cache.residency_version == quiet
        look()
        second = world.acquire("acme/b")
        drive()
        second.release()
        world.cache.evict("acme/b", tenant="acme")
        look()
        assert [tiers for _, tiers in seen][-1] == [(first.digest, Place.HOST)]
        assert len({version for version, _ in seen}) >= 5


def test_what_another_base_had_is_not_listed() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        world.ready("acme/a").release()
        before = world.cache.residency_version
        world.cache.rebind(make_base("b" * 40))
        assert world.cache.residency() == ()
        assert world.cache.residency_version > before


# The ledger


@pytest.fixture
def loader() -> MemoryLoader:
    return MemoryLoader()


def noted(ledger: Ledger, loader: MemoryLoader, name: str, publisher: str | None = None) -> VersionKey:
    version = loader.publish(name)
    key = version.resolved.key
    ledger.verified(key, version.resolved, Manifest(version.resolved.base, (), ()), publisher)
    ledger.named(Ref.parse(name), key)
    return key


def test_the_ledger_finds_by_digest_name_and_alias_of_the_tenant(loader: MemoryLoader) -> None:
    ledger = Ledger(set)
    key = noted(ledger, loader, "acme/a", "key-1")
    base = key.base
    assert ledger.find(Ref.parse("acme/a"), base) == key
    assert ledger.find(Ref.parse(f"acme/a@sha256:{key.digest}"), base) == key
    assert ledger.find(Ref.parse(f"acme/a:default@sha256:{'0' * 64}"), base) is None
    assert ledger.find(Ref.parse(f"acme/b@sha256:{key.digest}"), base) is None
    assert ledger.find(Ref.parse("acme/a:prod"), base) is None
    assert ledger.find(Ref.parse("blue/a"), base) is None
    assert ledger.find(Ref.parse("acme/a"), make_base("b" * 40).pin) is None
    assert ledger.claims(key) == {("a", 1): "key-1"}
    ledger.strike(key, [("a", 1)])
    assert ledger.claims(key) == {}


def test_the_ledger_forgets_what_is_nowhere(loader: MemoryLoader) -> None:
    here = set[VersionKey]()
    ledger = Ledger(lambda: here)
    kept = noted(ledger, loader, "acme/kept")
    here.add(kept)
    for index in range(4 * LEAST_LIMIT):
        noted(ledger, loader, f"acme/n{index}")
    assert len(ledger) <= LEAST_LIMIT + 2
    assert ledger.find(Ref.parse("acme/kept"), kept.base) == kept


class Watched(HostCache):
    """Says whether it was asked for its usage with the cache's lock held: a client of a loader process decodes it."""

    cache: AdapterCache | None = None
    locked = False

    def usage(self) -> HostUsage:
        if self.cache is not None:
            self.locked = self.locked or self.cache._lock._lock.locked()  # type: ignore[attr-defined]
        return super().usage()


def test_the_hosts_usage_was_read_with_the_cache_locked() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        world.ready("acme/a")
        host = world.cache._host
        host.__class__ = Watched
        assert isinstance(host, Watched)
        host.cache = world.cache
        assert len(world.cache.residency()) == 1
        assert world.cache.residency_version > 0
        assert world.cache.statistics().host_bytes
        assert not host.locked


def test_a_key_is_hashed_once_and_stays_what_it_was() -> None:
    pin = make_base().pin
    one, other = VersionKey("acme", pin, "0" * 64), VersionKey("acme", make_base().pin, "0" * 64)
    assert one == other and hash(one) == hash(one) == hash(other)
    assert one != VersionKey("blue", pin, "0" * 64)
    assert {one: 1}[pickle.loads(pickle.dumps(other))] == 1
    assert [field.name for field in fields(one)] == ["tenant", "base", "digest"]
