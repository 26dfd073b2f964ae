"""What was revoked: who is refused, what becomes of leases and steps, and how soon VRAM is clear of it."""

from __future__ import annotations

import pytest

from adapterd.gpu_cache import Place
from adapterd.gpu_cache.events import Quarantined
from adapterd.gpu_cache.revocation import Refusals, Revocation
from adapterd.gpu_cache.vram_tier import Cause
from adapterd.loader.errors import AdapterdError, Code, Conflict
from fakes.cache_world import World
from fakes.revoking import code_of, revoke, zeros


def test_leases_fail_and_new_ones_are_refused_with_the_reason() -> None:
    with World() as world:
        version = world.loader.publish("acme/a", 2)
        held = world.ready("acme/a")
        waiting = world.acquire("acme/a")
        revoke(world, version, reason="the data was not ours")
        assert code_of(held) is Code.VERSION_REVOKED
        world.settle()
        assert code_of(waiting) is Code.VERSION_REVOKED
        with pytest.raises(Conflict) as refused:
            world.cache.begin_step([held])
        assert refused.value.code is Code.VERSION_REVOKED
        assert "the data was not ours" in refused.value.problem.message
        world.loader.calls.clear()
        for ref in (version.pinned, "acme/a"):
            assert world.failure(ref) is Code.VERSION_REVOKED
        assert world.failure([("acme/a", 0.5)]) is Code.VERSION_REVOKED
        assert not any(call.startswith(("prepare", "fill")) for call in world.loader.calls)
        newer = world.loader.publish("acme/a")
        assert world.ready("acme/a").composition[0][0].key.digest == newer.digest


def test_vram_and_host_memory_are_clear_of_it_at_once_when_nothing_reads_it() -> None:
    with World(vram=4, host=8) as world:
        version = world.loader.publish("acme/a", 3)
        pages_of_it = world.ready("acme/a").composition[0][0].pages
        revoke(world, version)
        assert (world.vram_free, world.host_free) == (4, 8)
        world.device.drain()
        assert zeros(world, pages_of_it)
        assert world.cache.residency() == ()
        assert world.cache.statistics().evictions[Cause.REVOKED] == 1


# Whom it is about


def test_one_name_is_quarantined_and_the_same_bytes_stay_under_another() -> None:
    with World() as world:
        version = world.loader.publish("acme/a", 2)
        world.loader.publish("acme/b", 2, digest=version.digest)
        first, second = world.ready("acme/a"), world.ready("acme/b")
        world.cache.heed(Quarantined("acme", "a", 1, version.digest))
        world.settle()
        assert code_of(first) is Code.VERSION_REVOKED
        world.step(second)
        world.settle()
        assert world.violations == []
        assert world.zeroed == 0


@pytest.mark.parametrize(
    ("revocation", "left"),
    [({"digest": "1" * 64}, 4), ({"adapter": "b"}, 2), ({"key_id": "k1"}, 2), ({"digest": "2" * 64}, 2)],
)
def test_an_image_that_nobody_here_has_asked_for_goes_by_its_digest_only(revocation: dict[str, str], left: int) -> None:
    """It is in host memory because of another worker: what it is called, and who signed it, is not known here."""
    with World(host=4) as world:
        version = world.loader.publish("acme/a", 2, digest="1" * 64)
        number = world.cache._host.fetch([version.resolved], "acme", lambda _: None)
        world.settle()
        world.cache._host.release(number)
        assert world.host_free == 2
        world.cache.revoke(Revocation("acme", **revocation))  # type: ignore[arg-type]
        assert world.host_free == left


def test_a_revoked_key_takes_all_that_it_signed_and_nothing_else() -> None:
    with World(vram=8) as world:
        mine = [world.loader.publish(f"acme/{name}", publisher="k1") for name in "ab"]
        other = world.loader.publish("acme/c", publisher="k2")
        unsigned = world.loader.publish("acme/d")
        foreign = world.loader.publish("blue/a", publisher="k1")
        leases = {v.digest: world.ready(v.pinned) for v in (*mine, other, unsigned, foreign)}
        world.cache.revoke(Revocation("acme", key_id="k1"))
        assert [code_of(leases[v.digest]) for v in mine] == [Code.VERSION_REVOKED] * 2
        assert all(leases[v.digest].ready for v in (other, unsigned, foreign))
        later = world.loader.publish("acme/e", publisher="k1")
        assert world.failure(later.pinned) is Code.VERSION_REVOKED  # known once it is verified
        assert later.digest not in {r.digest for r in world.cache.residency() if r.tier is Place.RESIDENT}
        world.step(*(leases[v.digest] for v in (other, unsigned, foreign)))
        world.settle()
        assert world.violations == []


def test_the_same_bytes_under_two_keys_stay_for_the_one_that_holds() -> None:
    with World() as world:
        first = world.loader.publish("acme/a", publisher="k1")
        world.loader.publish("acme/b", digest=first.digest, publisher="k2")
        one, both, two = world.ready("acme/a"), world.ready([("acme/a", 1.0), ("acme/b", 1.0)]), world.ready("acme/b")
        world.cache.revoke(Revocation("acme", key_id="k1"))
        assert [code_of(lease) for lease in (one, both)] == [Code.VERSION_REVOKED] * 2
        world.step(two)
        world.settle()
        assert world.violations == []
        assert [row.adapters for row in world.cache.residency()] == [("b",)]
        assert world.failure("acme/a") is Code.VERSION_REVOKED
        world.cache.revoke(Revocation("acme", key_id="k2"))
        assert code_of(two) is Code.VERSION_REVOKED
        assert world.cache.residency() == ()


def test_a_lease_that_is_being_verified_under_a_name_that_holds_begins_again() -> None:
    with World(vram=4) as world:
        first = world.loader.publish("acme/a", 2, publisher="k1")
        world.loader.publish("acme/b", 2, digest=first.digest, publisher="k2")
        world.ready("acme/a")
        second = world.acquire("acme/b")
        world.pool.run_one()  # resolved; not verified yet
        world.cache.revoke(Revocation("acme", key_id="k1"))
        world.settle()
        assert second.ready
        world.step(second)
        world.settle()
        assert world.violations == []


@pytest.mark.parametrize("version_number", [None, 1])
def test_a_name_or_one_of_its_versions(version_number: int | None) -> None:
    with World() as world:
        old, new = world.loader.publish("acme/a"), world.loader.publish("acme/a")
        other = world.loader.publish("acme/b")
        leases = [world.ready(version.pinned) for version in (old, new, other)]
        world.cache.revoke(Revocation("acme", adapter="a", version_number=version_number))
        assert [lease.failed for lease in leases] == [True, version_number is None, False]


def test_another_tenant_is_not_touched() -> None:
    with World() as world:
        version = world.loader.publish("acme/a", publisher="k1")
        same = world.loader.publish("blue/a", digest=version.digest, publisher="k1")
        lease = world.ready("blue/a")
        for revocation in (
            Revocation("acme", digest=version.digest), Revocation("acme", adapter="a"), Revocation("acme", key_id="k1"),
        ):  # fmt: skip
            world.cache.revoke(revocation)
        assert lease.ready
        assert world.ready(same.pinned).ready
        assert world.failure("acme/a") is Code.VERSION_REVOKED
        assert world.failure(f"acme/a@sha256:{version.digest}", "blue") is Code.NOT_FOUND


def test_one_that_comes_again_does_nothing_and_one_that_is_taken_back_serves_again() -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        world.ready("acme/a").release()
        revoke(world, version)
        world.settle()
        zeroed = world.zeroed
        revoke(world, version, reason="again")
        world.settle()
        assert world.zeroed == zeroed
        assert world.cache.reinstate(Revocation("acme", digest=version.digest))
        assert not world.cache.reinstate(Revocation("acme", digest=version.digest))
        assert world.ready("acme/a").ready


def test_an_image_that_is_only_in_host_memory_goes_too() -> None:
    with World(vram=4, host=4) as world:
        version = world.loader.publish("acme/a", 2, publisher="k1")
        world.cache.prefetch("acme/a", tenant="acme", to="host")
        world.settle()
        assert world.host_free == 2
        world.cache.revoke(Revocation("acme", key_id="k1"))
        assert world.host_free == 4
        assert world.failure(version.pinned) is Code.VERSION_REVOKED


def test_pins_and_prefetches_of_it_fail() -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        pin = world.cache.pin("acme/a", tenant="acme")
        world.settle()
        coming = world.cache.prefetch("acme/a", tenant="acme")
        revoke(world, version)
        world.settle()
        assert code_of(pin) is Code.VERSION_REVOKED
        assert code_of(coming) is Code.VERSION_REVOKED
        assert [row.problem for row in world.cache.pins()] == [pin.problem]


def test_after_closing_it_is_only_noted() -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        world.ready("acme/a").release()
    revoke(world, version)
    assert world.zeroed == 0


# The list


def test_a_revocation_names_something() -> None:
    for bad in ({}, {"version_number": 1}, {"digest": "0" * 64, "version_number": 1}):
        with pytest.raises(ValueError, match=r"names|version number"):
            Revocation("acme", **bad)  # type: ignore[arg-type]


def test_all_that_is_given_must_fit() -> None:
    with World() as world:
        resolved = world.loader.publish("acme/a").resolved
    for fits, revocation in [
        (True, Revocation("acme", resolved.version_digest, "a", 1, "k1")),
        (False, Revocation("acme", resolved.version_digest, "a", 2)),
        (False, Revocation("acme", resolved.version_digest, "b")),
        (False, Revocation("acme", resolved.version_digest, key_id="k2")),
        (False, Revocation("acme", adapter="a", key_id="k2")),
        (False, Revocation("blue", resolved.version_digest)),
    ]:
        refusals = Refusals()
        assert refusals.add(revocation)
        assert not refusals.add(revocation)
        assert (refusals.refusal(resolved, "k1") is not None) is fits
        with_ = refusals.refusal(resolved, None)
        assert with_ is None or revocation.key_id is None


def test_the_refusal_is_an_error_of_the_tree() -> None:
    with World() as world, pytest.raises(AdapterdError) as refused:
        version = world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        revoke(world, version)
        lease.wait(0)
    assert isinstance(refused.value, Conflict)
