"""The engine on a row-wise toy, each row against float64 weights merged for that row alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.layout import Dtype
from fakes.batches import DISTRIBUTIONS, ROWS, adapters_of, batch, compositions
from fakes.merged import Composition, merged_model, per_row
from fakes.static_cache import StaticCache
from fakes.toy_models import FUSED, HIDDEN, LINEARS, STACKED, toy, toy_spec
from fakes.toy_steps import refused, run

ULPS = {torch.float64: 64, torch.float32: 16, torch.bfloat16: 2, torch.float16: 2}
"""Tolerance in units of eps(dtype) × the largest output: two low-precision layers round that much."""


@pytest.fixture
def cache() -> StaticCache:
    return StaticCache(toy_spec(), n_pages=1500)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_each_row_gets_its_own_adapter(cache: StaticCache, distribution: str, fused: bool) -> None:
    owners = DISTRIBUTIONS[distribution]
    adapters = adapters_of(cache, max(owners) + 1)
    model, plain = toy(fused=fused), toy(fused=fused)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    places = FUSED if fused else ()
    wanted = per_row(plain, x, compositions(adapters, owners), places)
    with LoRAEngine(model, cache, STACKED if fused else None) as engine:
        got = run(engine, model, x, batch(cache, adapters, owners))
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)
    if distribution == "distinct":  # the oracle tells adapters apart at this tolerance
        assert (wanted - plain.double()(x.double())).abs().amax(dim=1).min() > 1e-2


@pytest.mark.parametrize("adapter_dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("base_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_of_base_and_adapter(cache: StaticCache, base_dtype: torch.dtype, adapter_dtype: Dtype) -> None:
    adapters = adapters_of(cache, 3, adapter_dtype)
    model = toy(dtype=base_dtype)
    owners = [0, 0, 1, -1, 2, 2]
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(2)).to(base_dtype)
    wanted = per_row(model, x, compositions(adapters, owners))
    engine = LoRAEngine(model, cache)
    got = run(engine, model, x, batch(cache, adapters, owners))
    assert got.dtype == base_dtype
    atol = ULPS[base_dtype] * torch.finfo(base_dtype).eps * float(wanted.abs().max())
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=atol)


def test_a_bf16_layer_rounds_its_delta_once(cache: StaticCache) -> None:
    """base output (bf16) + delta (fp32), rounded to bf16: nothing is rounded before the sum."""
    adapter = cache.add({LINEARS[0]: 8}, seed=1)
    model = toy(dtype=torch.bfloat16)
    layer = model.get_submodule(LINEARS[0])
    x = torch.randn(5, HIDDEN).bfloat16()
    base = layer(x)
    f = adapter.modules[LINEARS[0]]
    exact = base.double() + f.scaling * x.double() @ f.a.double().T @ f.b.double().T
    engine = LoRAEngine(model, cache)
    got = run(engine, layer, x, [(cache.lease(adapter), 5)])
    ulp = torch.finfo(torch.bfloat16).eps * exact.abs()
    assert ((got.double() - exact).abs() <= 0.501 * ulp).all()


def test_compositions_add_up_with_their_weights(cache: StaticCache) -> None:
    one, two, three = adapters_of(cache, 3)
    mixes: list[Composition] = [
        [(one, 0.75), (two, -0.5)], [], [(three, 2.0)], [(one, 0.25), (two, 0.25), (three, 0.5)],
    ]  # fmt: skip
    model = toy()
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(3))
    wanted = per_row(model, x, [mix for mix in mixes for _ in range(2)])
    engine = LoRAEngine(model, cache)
    got = run(engine, model, x, [(cache.lease(*mix), 2) for mix in mixes])
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)


def test_base_rows_keep_their_bits(cache: StaticCache) -> None:
    (adapter,) = adapters_of(cache, 1)
    model = toy(dtype=torch.bfloat16)
    x = torch.randn(12, HIDDEN).bfloat16()
    before = model(x)
    engine = LoRAEngine(model, cache)
    assert torch.equal(model(x), before), "outside a step"
    assert torch.equal(run(engine, model, x, [(None, 12)]), before), "a step of base rows"
    mixed = run(engine, model, x, [(None, 5), (cache.lease(adapter), 3), (None, 4)])
    assert torch.equal(mixed[:5], before[:5])
    assert torch.equal(mixed[8:], before[8:])
    assert not torch.equal(mixed[5:8], before[5:8])


def test_a_step_repeats_bit_for_bit(cache: StaticCache) -> None:
    adapters = adapters_of(cache, 5)
    model, x = toy(), torch.randn(ROWS, HIDDEN)
    engine = LoRAEngine(model, cache)
    rows = batch(cache, adapters, DISTRIBUTIONS["zipf"])
    first = run(engine, model, x, rows)
    assert all(torch.equal(first, run(engine, model, x, rows)) for _ in range(3))


def test_leading_dimensions_are_rows_in_order(cache: StaticCache) -> None:
    adapters = adapters_of(cache, 2)
    model, x = toy(), torch.randn(2, 3, HIDDEN)
    owners = [0, 0, 0, 1, 1, 1]
    wanted = per_row(model, x.reshape(6, HIDDEN), compositions(adapters, owners))
    engine = LoRAEngine(model, cache)
    got = run(engine, model, x, batch(cache, adapters, owners))
    assert got.shape == x.shape
    torch.testing.assert_close(got.reshape(6, HIDDEN).double(), wanted, rtol=0, atol=2e-5)
    strided = run(engine, model, x.transpose(0, 1), batch(cache, adapters, [0, 1] * 3))
    torch.testing.assert_close(strided.transpose(0, 1), got, rtol=0, atol=2e-5)


def test_a_page_reused_by_another_adapter(cache: StaticCache) -> None:
    """The table of a slot is made again when the slot's generation has moved on."""
    adapters = adapters_of(cache, 2)
    model, x = toy(), torch.randn(4, HIDDEN)
    engine = LoRAEngine(model, cache)
    run(engine, model, x, batch(cache, adapters, [0, 0, 1, 1]))
    cache.evict(adapters[0])
    successor = cache.add(dict.fromkeys(LINEARS[2:5], 3), seed=77)
    assert successor.resident.slot == adapters[0].resident.slot
    wanted = per_row(toy(), x, compositions([successor, adapters[1]], [0, 0, 1, 1]))
    got = run(engine, model, x, batch(cache, [successor, adapters[1]], [0, 0, 1, 1]))
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)


def test_gradients_flow_through_the_delta(cache: StaticCache) -> None:
    (adapter,) = adapters_of(cache, 1)
    model = toy()
    x = torch.randn(3, HIDDEN, requires_grad=True)
    truth = x.detach().double().requires_grad_()
    merged_model(model, [(adapter, 1.0)])(truth).square().sum().backward()
    engine = LoRAEngine(model, cache)
    run(engine, model, x, [(cache.lease(adapter), 3)]).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), truth.grad, rtol=1e-4, atol=1e-4)


def test_inference_mode(cache: StaticCache) -> None:
    (adapter,) = adapters_of(cache, 1)
    model, x = toy(), torch.randn(3, HIDDEN)
    engine = LoRAEngine(model, cache)
    rows = [(cache.lease(adapter), 3)]
    with torch.inference_mode():
        inside = run(engine, model, x, rows)
    assert torch.equal(inside, run(engine, model, x, rows))


class Packed(nn.Module):
    """A base that is no nn.Linear: int8 weight and a scale a row, as quantised linears are."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        generator = torch.Generator().manual_seed(9)
        self.register_buffer(
            "packed",
            torch.randint(-127, 128, (out_features, in_features), generator=generator).to(torch.int8),
        )
        self.register_buffer("scale", torch.rand(out_features, 1, generator=generator) / 127)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.packed.to(x.dtype) * self.scale.to(x.dtype)).T


def test_a_quantised_base_runs_its_own_forward() -> None:
    model = nn.ModuleDict({"x": Packed(32, 20)})
    base = BaseSpec.from_module(model, id="tests/packed", revision="b" * 40)
    cache = StaticCache(base)
    adapter = cache.add({"x": 5}, seed=1)
    packed_before = model["x"].packed.clone()
    x = torch.randn(6, 32)
    f = adapter.modules["x"]
    wanted = model["x"](x.double()) + f.scaling * x.double() @ f.a.double().T @ f.b.double().T
    engine = LoRAEngine(model, cache)
    with engine.step([(cache.lease(adapter), 6)]):
        got = model["x"](x=x)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)
    assert torch.equal(model["x"].packed, packed_before)


def test_the_receipt_says_what_ran(cache: StaticCache) -> None:
    one, two = adapters_of(cache, 2)
    model, x = toy(), torch.randn(6, HIDDEN)
    engine = LoRAEngine(model, cache)
    with engine.step([(cache.lease((one, 0.5), two), 2), (None, 3), (cache.lease(two), 1)]) as step:
        model(x)
    receipt = step.receipt
    assert [(s.row_start, s.rows) for s in receipt.segments] == [(0, 2), (2, 3), (5, 1)]
    assert receipt.segments[1].applied == ()
    applied = receipt.segments[0].applied
    assert [(a.tenant, a.version_digest, a.weight) for a in applied] == [
        ("acme", one.resident.key.digest, 0.5), ("acme", two.resident.key.digest, 1.0),
    ]  # fmt: skip
    assert (applied[1].slot, applied[1].generation) == (two.resident.slot, two.resident.generation)
    assert (receipt.kernel, receipt.fallback, receipt.device) == ("reference:torch", False, "cpu")
    assert (receipt.layer_calls, receipt.not_run, receipt.batch_invariant) == (len(LINEARS), (), False)
    assert cache.tickets[-1].ends == 1


def test_the_receipt_names_adapted_modules_that_never_ran(cache: StaticCache) -> None:
    adapter = cache.add({LINEARS[0]: 2, LINEARS[5]: 2}, seed=1)
    model = toy()
    engine = LoRAEngine(model, cache)
    with engine.step([(cache.lease(adapter), 1)]) as step:
        model.get_submodule(LINEARS[0])(torch.randn(1, HIDDEN))
    assert step.receipt.not_run == (LINEARS[5],)


def test_closing_leaves_the_model_as_it_was(cache: StaticCache) -> None:
    (adapter,) = adapters_of(cache, 1)
    model, x = toy(), torch.randn(3, HIDDEN)
    before, names = model(x), list(model.state_dict())
    engine = LoRAEngine(model, cache)
    assert list(model.state_dict()) == names
    run(engine, model, x, [(cache.lease(adapter), 3)])
    engine.close()
    engine.close()
    assert torch.equal(model(x), before)
    assert not any(module._forward_hooks for module in model.modules())
    for call in (engine.step([(None, 3)]).__enter__, lambda: engine.rebind(model, toy_spec())):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_base_reload_serves_the_new_model_only(cache: StaticCache) -> None:
    (old_adapter,) = adapters_of(cache, 1)
    old, new = toy(seed=3), toy(seed=4)
    engine = LoRAEngine(old, cache)
    lease, x = cache.lease(old_adapter), torch.randn(2, HIDDEN)
    run(engine, old, x, [(lease, 2)])
    base = BaseSpec.of(toy_spec().modules, id="tests/toy", revision="c" * 40)
    engine.rebind(new, base)
    assert cache.base.revision == "c" * 40
    assert not any(module._forward_hooks for module in old.modules())
    refused(Code.SLOT_STALE, engine, new, x, [(lease, 2)])
    adapter = cache.add(dict.fromkeys(LINEARS, 4), seed=50)
    got = run(engine, new, x, [(cache.lease(adapter), 2)])
    wanted = merged_model(toy(seed=4), [(adapter, 1.0)])(x.double())
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)


def test_a_reload_that_does_not_fit_changes_nothing(cache: StaticCache) -> None:
    (adapter,) = adapters_of(cache, 1)
    model, x = toy(), torch.randn(2, HIDDEN)
    engine = LoRAEngine(model, cache)
    rows = [(cache.lease(adapter), 2)]
    before = run(engine, model, x, rows)
    with pytest.raises(AdapterdError, match="BASE_TABLE_INVALID"):
        engine.rebind(nn.ModuleDict({"other": nn.Linear(4, 4)}), toy_spec())
    assert torch.equal(run(engine, model, x, rows), before)


def test_a_copy_of_a_wrapped_model_is_the_base_and_carries_no_arena(cache: StaticCache) -> None:
    adapter = cache.add({LINEARS[0]: 8}, seed=1)
    model, plain = toy(), toy()
    x = torch.ones(2, HIDDEN)
    engine = LoRAEngine(model, cache)
    before = len(pickle.dumps(model))
    with engine.step([(cache.lease(adapter), 2)]):
        copied, pickled = copy.deepcopy(model), pickle.dumps(model)
        assert not torch.equal(model(x), plain(x))
        assert torch.equal(copied(x), plain(x))
    assert torch.equal(copied(x), plain(x))
    assert len(pickled) == before < cache.arena.numel()
    assert torch.equal(pickle.loads(pickled)(x), plain(x))
