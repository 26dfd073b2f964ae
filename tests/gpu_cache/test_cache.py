"""The cache's behaviour, step by step, on a device and a loader that run when told."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch

from adapterd.gpu_cache import Lease, LeaseState, Place, TenantBudget
from adapterd.gpu_cache.device import Event, Run, Stream
from adapterd.loader.errors import AdapterdError, Code, error, reject
from fakes.adapters import PAGE_BYTES, make_base, wrong_pages
from fakes.cache_world import World, pages, shares
from fakes.devices import DefectiveDevice, SimulatedDevice

# Places


def test_from_absent_to_resident_and_back_through_the_host() -> None:
    with World(vram=4) as world:
        first, second = world.loader.publish("acme/a", 3), world.loader.publish("acme/b", 3)
        lease = world.acquire("acme/a")
        assert world.cache.statistics().adapters == dict.fromkeys(Place, 0)
        world.pool.run_one()  # resolve
        assert world.cache.statistics().adapters[Place.ABSENT] == 1
        world.pool.run_all()
        assert world.cache.statistics().adapters[Place.STAGING] == 1
        assert not lease.ready
        world.settle()
        assert lease.ready
        assert world.cache.statistics().adapters[Place.RESIDENT] == 1
        lease.release()
        world.ready("acme/b").release()
        assert world.cache.statistics().adapters == {
            Place.ABSENT: 0,
            Place.HOST: 1,
            Place.STAGING: 0,
            Place.RESIDENT: 1,
        }
        world.loader.calls.clear()
        again = world.ready(first.pinned)
        assert world.loader.calls == []  # a host hit, pinned: neither the source nor the loader is asked
        assert wrong_pages(world.cache.arena, again.composition[0][0]) == []
        statistics = world.cache.statistics()
        assert (statistics.hits, statistics.host_hits, statistics.misses) == (0, 1, 2)
        assert second.digest != first.digest


def test_without_a_host_tier_the_slab_is_free_after_the_copy() -> None:
    with World(keep_host=False, host=3) as world:
        for name in "ab":
            world.loader.publish(f"acme/{name}", 3)
            world.ready(f"acme/{name}")
            assert world.host_free == 3


def test_the_host_tier_gives_way_oldest_first() -> None:
    with World(vram=2, host=6) as world:
        for name in "abcd":
            world.loader.publish(f"acme/{name}", 2)
            world.ready(f"acme/{name}").release()
        assert world.host_free == 0
        world.loader.calls.clear()
        world.ready("acme/b").release()
        assert "fill acme/b" not in world.loader.calls
        world.ready("acme/a").release()
        assert "fill acme/a" in world.loader.calls


def test_one_version_is_loaded_once_for_all_who_wait() -> None:
    with World() as world:
        version = world.loader.publish("acme/a", 2)
        leases = [world.acquire(ref) for ref in ("acme/a", "acme/a", version.pinned, "acme/a")]
        world.settle()
        assert all(lease.ready for lease in leases)
        assert [c for c in world.loader.calls if not c.startswith("resolve")] == ["prepare acme/a", "fill acme/a"]
        assert len({lease.composition[0][0] for lease in leases}) == 1


def test_an_alias_is_looked_up_at_every_acquire() -> None:
    with World() as world:
        old = world.loader.publish("acme/a")
        assert world.ready("acme/a").composition[0][0].key.digest == old.digest
        new = world.loader.publish("acme/a")
        assert world.ready("acme/a").composition[0][0].key.digest == new.digest


def test_the_same_bytes_under_another_name_are_verified_under_that_name() -> None:
    """A resident version must not lend its verification to another adapter's claim of the same digest."""
    with World() as world:
        version = world.loader.publish("acme/a")
        lease = world.ready("acme/a")
        world.loader.publish("acme/b", digest=version.digest)
        world.loader.failures["prepare acme/b"] = reject(Code.STATEMENT_MISMATCH, "adapter", "not this one")
        assert world.failure("acme/b") is Code.STATEMENT_MISMATCH
        assert lease.ready
        del world.loader.failures["prepare acme/b"]
        world.loader.calls.clear()
        both = world.ready([("acme/a", 0.25), ("acme/b", 0.5)])
        assert [w for _, w in both.composition] == [0.75]
        assert world.loader.calls == ["resolve acme/a", "resolve acme/b", "prepare acme/b"]


# Failures


def test_a_bad_adapter_fails_its_own_requests_only() -> None:
    with World() as world:
        world.loader.publish("acme/bad"), world.loader.publish("acme/good")
        world.loader.failures["fill acme/bad"] = reject(Code.CHUNK_MISMATCH, "weights", "chunk 3")
        bad, also_bad = world.acquire("acme/bad"), world.acquire([("acme/bad", 1.0), ("acme/good", 1.0)])
        good = world.acquire("acme/good")
        world.settle()
        assert good.ready
        assert bad.problem is not None
        assert bad.problem.code is Code.CHUNK_MISMATCH
        assert also_bad.failed
        with pytest.raises(AdapterdError) as refused:
            bad.wait(0)
        assert refused.value.code is Code.CHUNK_MISMATCH
        del world.loader.failures["fill acme/bad"]
        world.loader.calls.clear()
        assert world.ready("acme/bad").ready
        assert world.loader.calls == ["resolve acme/bad", "prepare acme/bad", "fill acme/bad"]


def test_another_tenants_adapter_is_an_unknown_one() -> None:
    with World() as world:
        world.loader.publish("blue/secret")
        foreign, unknown = world.acquire("blue/secret", "acme"), world.acquire("acme/secret")
        assert not foreign.failed
        assert not unknown.failed
        world.settle()
        assert foreign.problem is not None
        assert unknown.problem is not None
        assert foreign.problem.as_json() == unknown.problem.as_json() | {"where": "blue/secret"}
        assert world.loader.calls == ["resolve acme/secret"]
        assert world.failure([("acme/secret", 1.0), ("blue/secret", 0.0)], "acme") is Code.NOT_FOUND


def test_a_resident_foreign_version_is_no_short_cut() -> None:
    with World() as world:
        version = world.loader.publish("blue/secret")
        world.ready("blue/secret")
        assert world.failure(version.pinned, "acme") is Code.NOT_FOUND


@pytest.mark.parametrize(
    ("wish", "code"),
    [
        ("not a ref", Code.REF_INVALID),
        ("Acme/a", Code.REF_INVALID),
        ([("acme/a", float("nan"))], Code.COMPOSITION_INVALID),
        ([("acme/a", 1.0)] * 17, Code.COMPOSITION_INVALID),
        ([("acme/a", 1.5e308), ("acme/a", 1.5e308)], Code.COMPOSITION_INVALID),
        ([("acme/a", 1.0), ("acme/wide", 1.0)], Code.COMPOSITION_INVALID),
    ],
)
def test_what_is_wrong_with_a_request_is_the_leases_failure(wish: str, code: Code) -> None:
    with World(max_composition_rank=16) as world:
        world.loader.publish("acme/a", rank=8), world.loader.publish("acme/wide", rank=9)
        assert world.failure(wish, "acme") is code


def test_too_large_fails_at_once_with_the_numbers() -> None:
    budgets = {"acme": TenantBudget(max_vram_bytes=pages(4))} | shares(blue=3)
    with World(vram=8, host=16, tenants=budgets) as world:
        world.loader.publish("acme/a", 3), world.loader.publish("acme/b", 2), world.loader.publish("acme/c", 5)
        world.loader.publish("core/c", 6)
        for wish in ("acme/c", [("acme/a", 1.0), ("acme/b", 1.0)]):
            lease = world.acquire(wish)
            world.settle()
            assert lease.problem is not None
            assert lease.problem.code is Code.BUDGET_EXCEEDED
            assert str(5 * PAGE_BYTES) in lease.problem.message
            assert str(4 * PAGE_BYTES) in lease.problem.message
        assert world.failure("core/c") is Code.BUDGET_EXCEEDED
        assert world.cache.statistics().vram_bytes == {}


def test_a_source_that_answers_something_else_is_not_believed() -> None:
    with World() as world:
        asked, other = world.loader.publish("acme/a"), world.loader.publish("acme/b")
        world.loader.answers = {asked.digest: other.resolved}
        assert world.failure(asked.pinned) is Code.STATEMENT_MISMATCH


def test_a_bug_in_the_loader_fails_the_lease_and_comes_out() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.acquire("acme/a")
        world.pool.run_one()
        world.loader.breaks = True
        with pytest.raises(ZeroDivisionError):
            world.pool.run_one()
        assert lease.problem is not None
        assert lease.problem.code is Code.INTERNAL


class _Refusing(DefectiveDevice):
    """Refuses the next copy."""

    refuse = True

    def __init__(self, inner: SimulatedDevice) -> None:
        super().__init__(inner)
        self.copy_runs = self._copy_runs  # type: ignore[method-assign, assignment]

    def _copy_runs(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int
    ) -> None:
        if self.refuse:
            self.refuse = False
            raise error(Code.DEVICE_ERROR, "simulated", "no more copies")
        self.inner.copy_runs(stream, dst, src, runs, page_bytes)


def test_a_copy_that_the_device_refuses_fails_its_leases_and_its_pages_are_not_reused() -> None:
    with World(vram=4, host=8, defect=_Refusing) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        assert world.failure("acme/a") is Code.DEVICE_ERROR
        assert world.ready("acme/b").ready
        assert world.vram_free == 0


# Waiting for room


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


# Leases


def test_release_is_idempotent() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        one, two = world.ready("acme/a"), world.ready("acme/a")
        one.release()
        one.release()
        assert world.cache.statistics().leases[LeaseState.RELEASED] == 1
        assert two.ready
        for use in (lambda: one.composition, lambda: one.wait(0), lambda: world.cache.begin_step([one])):
            with pytest.raises(AdapterdError) as refused:
                use()
            assert refused.value.code is Code.LEASE_RELEASED


def test_a_dropped_lease_is_found_and_counted() -> None:
    with World(vram=2) as world:
        world.loader.publish("acme/a", 2), world.loader.publish("acme/b", 2)
        lease: Lease | None = world.ready("acme/a")
        waiting = world.acquire("acme/b")
        world.settle()
        assert not waiting.ready
        assert lease is not None
        lease = None
        gc.collect()
        world.settle()
        assert waiting.ready
        assert world.cache.statistics().leaked_leases == 1


def test_a_released_or_failed_lease_is_no_leak() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        world.ready("acme/a").release()
        world.failure("acme/none")
        gc.collect()
        world.cache.pump()
        statistics = world.cache.statistics()
        assert statistics.leaked_leases == 0
        assert sum(statistics.leases[state] for state in LeaseState if state is not LeaseState.RELEASED) == 0


@pytest.mark.parametrize("jobs", range(4))
def test_release_cancels_what_only_it_waited_for(jobs: int) -> None:
    with World() as world:
        world.loader.publish("acme/a", 2)
        lease = world.acquire("acme/a")
        for _ in range(jobs):
            world.pool.run_one()
        lease.release()
        world.settle()
        done = {call.split()[0] for call in world.loader.calls}
        assert done == set(["resolve", "prepare", "fill"][:jobs])
        assert (world.host_free == 16) == (jobs < 3)
        assert world.ready("acme/a").ready


def test_what_was_cancelled_and_is_wanted_again_is_loaded() -> None:
    with World() as world:
        world.loader.publish("acme/a", 2)
        lease = world.acquire("acme/a")
        world.pool.run_one()
        lease.release()
        again = world.acquire("acme/a")
        world.settle()
        assert again.ready


def test_the_prefix_key_is_known_once_resolved() -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        lease = world.acquire("acme/a")
        with pytest.raises(AdapterdError) as early:
            lease.prefix_key()
        assert early.value.code is Code.LEASE_NOT_READY
        world.pool.run_one()
        assert not lease.ready
        key = lease.prefix_key()
        assert world.acquire([(version.pinned, 0.5), ("acme/a", 0.5)]).failed is False
        half = world.acquire([(version.pinned, 0.5), ("acme/a", 0.5)])
        world.settle()
        assert half.prefix_key() == key == world.ready(version.pinned).prefix_key()
        nothing = world.ready([("acme/a", 1.0), (version.pinned, -1.0)])
        assert nothing.composition == ()
        assert nothing.prefix_key() == world.acquire(None).prefix_key() != key


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


# What was found out before


def test_a_pinned_digest_that_is_resident_is_ready_at_once() -> None:
    """Nobody is asked, nothing is queued; an alias is looked up."""
    with World() as world:
        version = world.loader.publish("acme/a")
        world.ready("acme/a").release()
        world.loader.calls.clear()
        for wish in (version.pinned, [(version.pinned, 0.5)]):
            with world.acquire(wish, "acme") as lease:
                assert lease.ready
        assert not world.pool.run_one()
        with world.acquire("acme/a") as lease:
            assert not lease.ready
            world.settle()
            assert lease.ready
        assert world.loader.calls == ["resolve acme/a"]


@pytest.mark.parametrize("pinned", [False, True])
def test_after_a_change_of_trust_what_is_resident_is_verified_again_once(pinned: bool) -> None:
    with World() as world:
        version = world.loader.publish("acme/a")
        wish = version.pinned if pinned else "acme/a"
        held = world.ready(wish)
        world.loader.trust_changes += 1
        world.loader.failures["prepare acme/a"] = reject(Code.KEY_REVOKED, "model.sig", "revoked")
        assert world.failure(wish) is Code.KEY_REVOKED
        world.step(held)  # a lease that is held serves on
        del world.loader.failures["prepare acme/a"]
        world.loader.calls.clear()
        world.ready(wish).release()
        world.ready(wish).release()
        assert [c for c in world.loader.calls if not c.startswith("resolve")] == ["prepare acme/a"]


def test_a_change_of_trust_while_the_loader_verifies_counts() -> None:
    with World() as world:
        world.loader.publish("acme/a")
        lease = world.acquire("acme/a")
        world.pool.run_one()  # resolved; the verification is queued
        world.loader.trust_changes += 1
        world.settle()
        assert lease.ready
        assert world.loader.calls.count("prepare acme/a") == 2


def test_a_refused_event_query_at_acquire_leaks_no_lease() -> None:
    with World(vram=2, defect=_Unqueryable) as world:
        world.loader.publish("acme/a", 2)
        world.loader.publish("acme/b", 2)
        lease = world.ready("acme/a")
        world.step(lease)
        lease.release()
        other = world.acquire("acme/b")
        world.pool.run_all()  # its copy is queued, and may be enqueued if the step is over
        _Unqueryable.broken = True
        try:
            with pytest.raises(AdapterdError) as refused:
                world.acquire("acme/a")
        finally:
            _Unqueryable.broken = False
        assert refused.value.code is Code.DEVICE_ERROR
        del refused
        gc.collect()
        world.settle()
        assert other.ready
        assert world.cache.statistics().leaked_leases == 1


class _UnqueryableEvent:
    def __init__(self, inner: Event) -> None:
        self.inner = inner

    def done(self) -> bool:
        if _Unqueryable.broken:
            raise error(Code.DEVICE_ERROR, "simulated", "event query")
        return self.inner.done()


class _Unqueryable(DefectiveDevice):
    """Whose compute events cannot be asked while `broken`."""

    broken = False

    def record(self, stream: Stream) -> Event:
        event = self.inner.record(stream)
        return _UnqueryableEvent(event) if stream == self.compute else event

    def wait(self, stream: Stream, event: Event) -> None:
        self.inner.wait(stream, event.inner if isinstance(event, _UnqueryableEvent) else event)
