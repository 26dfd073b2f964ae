"""What a step refuses: rows, modules, leases, threads; and that nothing of a failed step stays."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code, Unavailable
from fakes.batches import adapters_of
from fakes.merged import merged_model
from fakes.static_cache import StaticCache
from fakes.toy_models import HIDDEN, LINEARS, toy, toy_spec
from fakes.toy_steps import refused, run


@pytest.fixture
def cache() -> StaticCache:
    return StaticCache(toy_spec(), n_pages=1500)


@pytest.mark.parametrize("rows", [3, 5])
def test_a_row_count_that_does_not_match_is_an_error(cache: StaticCache, rows: int) -> None:
    (adapter,) = adapters_of(cache, 1)
    model = toy()
    engine = LoRAEngine(model, cache)
    for entries in ([(cache.lease(adapter), rows)], [(None, rows)]):
        caught = refused(Code.ROWS_MISMATCH, engine, model, torch.randn(4, HIDDEN), entries)
        assert caught.problem.where == LINEARS[0]
    assert model(torch.randn(4, HIDDEN)).shape == (4, HIDDEN), "the engine has let go"
    run(engine, model, torch.randn(4, HIDDEN), [(cache.lease(adapter), 4)])


def test_an_adapter_with_a_module_that_is_not_wrapped_is_refused(cache: StaticCache) -> None:
    adapter = cache.add({LINEARS[0]: 2, LINEARS[1]: 2}, seed=1)
    fits = cache.add({LINEARS[0]: 2}, seed=2)
    model = toy()
    engine = LoRAEngine(model, cache, targets=["q_proj"])
    caught = refused(Code.MODULE_NOT_SERVED, engine, model, torch.randn(1, HIDDEN), [(cache.lease(adapter), 1)])
    assert caught.problem.where == LINEARS[1]
    with pytest.raises(AdapterdError, match="MODULE_NOT_SERVED"):
        engine.check(cache.lease(adapter))
    assert all(ticket.ends == 1 for ticket in cache.tickets), "a refused step gives its ticket back"
    engine.check(cache.lease(fits))
    run(engine, model, torch.randn(1, HIDDEN), [(cache.lease(fits), 1)])


def test_leases_that_are_not_ready_or_gone_are_refused(cache: StaticCache) -> None:
    one, gone = adapters_of(cache, 2)
    model, x = toy(), torch.randn(1, HIDDEN)
    engine = LoRAEngine(model, cache)
    waiting, released, stale = (cache.lease(one), cache.lease(one), cache.lease(gone))
    waiting.ready, released.released = False, True
    cache.evict(gone)
    refused(Code.LEASE_NOT_READY, engine, model, x, [(waiting, 1)])
    refused(Code.LEASE_RELEASED, engine, model, x, [(released, 1)])
    refused(Code.SLOT_STALE, engine, model, x, [(stale, 1)])
    refused(Code.REQUEST_INVALID, engine, model, x, [(None, 0)])
    refused(Code.REQUEST_INVALID, engine, model, x, [])
    run(engine, model, x, [(cache.lease(one), 1)])


def test_one_step_at_a_time(cache: StaticCache) -> None:
    model, x = toy(), torch.randn(1, HIDDEN)
    engine = LoRAEngine(model, cache)
    step = engine.step([(None, 1)])
    with pytest.raises(RuntimeError, match="never entered"):
        step.__exit__(None, None, None)
    with step:
        with pytest.raises(RuntimeError, match="one step at a time"):
            engine.step([(None, 1)]).__enter__()
        with pytest.raises(RuntimeError, match="one step at a time"):
            engine.close()
        with pytest.raises(RuntimeError, match="receipt"):
            _ = step.receipt
        model(x)
    assert step.receipt.layer_calls == len(LINEARS)
    with pytest.raises(RuntimeError, match="entered once"):
        step.__enter__()
    assert torch.isfinite(run(engine, model, x, [(None, 1)])).all()


def test_a_layer_in_another_thread_is_an_error(cache: StaticCache) -> None:
    model, x = toy(), torch.randn(1, HIDDEN)
    engine = LoRAEngine(model, cache)
    raised: list[BaseException] = []

    def other() -> None:
        try:
            model(x)
        except RuntimeError as error:
            raised.append(error)

    with engine.step([(None, 1)]):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
    assert "another thread" in str(raised[0])


def test_two_engines_in_two_threads(cache: StaticCache) -> None:
    adapters = adapters_of(cache, 2)
    x = torch.randn(4, HIDDEN)
    models = [toy(), toy()]
    results: dict[int, list[Tensor]] = {0: [], 1: []}

    def serve(index: int) -> None:
        with LoRAEngine(models[index], cache) as engine:
            for _ in range(10):
                results[index].append(run(engine, models[index], x, [(cache.lease(adapters[index]), 4)]))

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index, got in results.items():
        assert len(got) == 10
        wanted = merged_model(toy(), [(adapters[index], 1.0)])(x.double())
        assert all(torch.equal(g, got[0]) for g in got)
        torch.testing.assert_close(got[0].double(), wanted, rtol=0, atol=2e-5)


def test_an_exception_in_the_model_ends_the_step(cache: StaticCache) -> None:
    model, x = toy(), torch.randn(1, HIDDEN)
    engine = LoRAEngine(model, cache)
    step = engine.step([(None, 1)])
    with pytest.raises(ZeroDivisionError), step:
        _ = 1 / 0
    assert cache.tickets[-1].ends == 1
    with pytest.raises(RuntimeError, match="receipt"):
        _ = step.receipt
    run(engine, model, x, [(None, 1)])


def test_a_layer_on_another_device_is_named() -> None:
    cache = StaticCache(toy_spec())
    adapter = cache.add({LINEARS[0]: 2}, seed=1)
    model = toy()
    engine = LoRAEngine(model, cache)
    with pytest.raises(Unavailable) as caught, engine.step([(cache.lease(adapter), 2)]):
        model.to("meta")(torch.randn(2, HIDDEN, device="meta"))
    assert caught.value.code is Code.DEVICE_ERROR
    assert caught.value.problem.where == LINEARS[0]


class Pair(nn.Linear):
    """Returns a tuple, as some engines' parallel linears do."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def test_a_layer_that_gives_no_tensor_is_named() -> None:
    model = nn.ModuleDict({"x": Pair(4, 4)})
    cache = StaticCache(BaseSpec.from_module(model, id="tests/pair", revision="b" * 40))
    engine = LoRAEngine(model, cache)
    assert isinstance(model["x"](torch.randn(2, 4)), tuple)
    with pytest.raises(AdapterdError) as caught, engine.step([(None, 2)]):
        model["x"](torch.randn(2, 4))
    assert caught.value.code is Code.MODULE_NOT_SERVED


def test_a_step_that_is_over_cannot_end_another_one(cache: StaticCache) -> None:
    model = toy()
    engine = LoRAEngine(model, cache)
    over, running = engine.step([(None, 1)]), engine.step([(None, 1)])
    with over:
        model(torch.ones(1, HIDDEN))
    with running:
        with pytest.raises(RuntimeError, match="not open"):
            over.__exit__(None, None, None)
        with pytest.raises(RuntimeError, match="a step is open"), engine.step([(None, 1)]):
            pass
        model(torch.ones(1, HIDDEN))
    assert running.receipt.layer_calls == over.receipt.layer_calls > 0
