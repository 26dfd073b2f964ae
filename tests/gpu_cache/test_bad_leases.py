"""Leases that fail: what is wrong with a request, an adapter, a source or a copy, and whom it concerns."""

from __future__ import annotations

import gc

import pytest

from adapterd.gpu_cache import TenantBudget
from adapterd.gpu_cache.device import Event, Stream
from adapterd.loader.errors import AdapterdError, Code, error, reject
from fakes.adapters import PAGE_BYTES
from fakes.cache_world import World, pages, shares
from fakes.devices import DefectiveDevice


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
