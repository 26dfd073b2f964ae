"""Both regimes against float64 on small shapes, with NaN wherever nobody should read."""

from __future__ import annotations

import pytest
import torch

from adapterd.gpu_cache.engine.device_plan import Regime
from adapterd.gpu_cache.engine.fast_path import STAGED_ROWS
from adapterd.gpu_cache.engine.kernels import launch
from adapterd.loader.errors import AdapterdError, Code
from fakes.batches import DISTRIBUTIONS, ROWS, adapters_of, batch, compositions
from fakes.merged import per_row
from fakes.one_linear import OneLinear, Owners, alone, close
from fakes.static_cache import StaticCache
from fakes.toy_models import FUSED, HIDDEN, STACKED, toy, toy_spec

TILES = {"batch_invariant": True}
REGIMES = [{}, TILES]
MIXED_RANKS = [[1], [5], [8], [16], [24], [64], [128]]


@pytest.fixture(autouse=True)
def scratch_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes of partial sums begin as NaN."""
    empty = torch.empty
    monkeypatch.setattr(launch.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def check(world: OneLinear, owners: Owners, *, ulps: float = 2.0) -> None:
    x, y = world.inputs(len(owners))
    got, receipt = world.run(x, y, owners)
    assert receipt.kernel.startswith("triton:")
    assert not receipt.fallback
    close(got, world.wanted(x, y, owners), ulps=ulps)
    base = [row for row, mix in enumerate(owners) if not mix]
    assert torch.equal(got[base], y[base])


@pytest.mark.parametrize("options", REGIMES, ids=["rows", "tiles"])
@pytest.mark.parametrize("adapter", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("layer", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype(layer: torch.dtype, adapter: str, options: dict[str, object]) -> None:
    world = OneLinear(64, [32, 16], [[4, 4], [9, 2]], layer, adapter, engine_options=options)  # type: ignore[arg-type]
    check(world, alone([1, -1, 0, 1]))


@pytest.mark.parametrize("options", REGIMES, ids=["rows", "tiles"])
def test_ranks_are_mixed_in_a_batch(options: dict[str, object]) -> None:
    world = OneLinear(64, [48], MIXED_RANKS, engine_options=options)
    check(world, alone([6, 0, -1, 5, 1, 4, 2, 3]))


@pytest.mark.parametrize("options", REGIMES, ids=["rows", "tiles"])
@pytest.mark.parametrize("rank", [15, 16, 17, 31, 32, 33])
def test_ranks_beside_a_boundary(rank: int, options: dict[str, object]) -> None:
    check(OneLinear(48, [32], [[rank]], engine_options=options), alone([0, -1]))


@pytest.mark.parametrize("options", REGIMES, ids=["rows", "tiles"])
@pytest.mark.parametrize(("k", "n"), [(15, 17), (16, 16), (33, 63), (63, 65), (64, 129), (130, 24)])
def test_widths_beside_a_boundary(k: int, n: int, options: dict[str, object]) -> None:
    check(OneLinear(k, [n, 8], [[3, 2], [17, 5]], engine_options=options), alone([0, 1]))


@pytest.mark.parametrize("k", [2048, 2047, 1100])
def test_parts_of_k(k: int) -> None:
    for options in REGIMES:
        check(OneLinear(k, [16], [[3]], page_bytes=1 << 16, engine_options=options), alone([0, -1, 0]))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
def test_rows_beside_a_tile(rows: int) -> None:
    check(OneLinear(48, [32], [[5], [3]], engine_options=TILES), alone([0] * rows + [-1] + [1] * rows))


def test_more_rows_than_are_worked_on_alone_make_tiles() -> None:
    world = OneLinear(32, [16], [[4], [2]])
    owners = alone([0, 1, -1] * 30)
    x, y = world.inputs(90)
    got, receipt = world.run(x, y, owners)
    assert receipt.kernel == f"triton:{Regime.ROWS}", "no linear is so wide that tiles pay"
    close(got, world.wanted(x, y, owners))
    owners = alone([0, 1, -1] * 90)
    x, y = world.inputs(270)
    got, receipt = world.run(x, y, owners)
    assert receipt.kernel == f"triton:{Regime.TILES}"
    close(got, world.wanted(x, y, owners))


@pytest.mark.parametrize("options", REGIMES, ids=["rows", "tiles"])
def test_compositions_and_weights(options: dict[str, object]) -> None:
    world = OneLinear(48, [32, 16], [[4, 0], [20, 3], [0, 70]], engine_options=options)
    mixes: Owners = [[(0, 0.5)], [(0, 0.75), (1, -0.5)], [], [(0, 1.0), (1, 1.0), (2, 2.0)], [(2, 1.0)], [(0, 0.5)]]
    check(world, mixes)


@pytest.mark.parametrize("options", REGIMES, ids=["rows", "tiles"])
def test_a_nan_stays_in_its_own_row(options: dict[str, object]) -> None:
    world = OneLinear(48, [32], [[4], [4], [20]], engine_options=options)
    owners = alone([0, 1, 0, 2, -1])
    x, y = world.inputs(5)
    wanted = world.wanted(x, y, owners)
    x[0] = float("nan")  # a row
    resident = world.adapters[1].resident  # an adapter
    for page in resident.pages:
        world.cache.arena[page * world.page_bytes : (page + 1) * world.page_bytes] = 0xFF
    got, _ = world.run(x, y, owners)
    assert got[:2].isnan().all()
    close(got[2:], wanted[2:])


def test_a_step_repeats_bit_for_bit() -> None:
    for options in REGIMES:
        world = OneLinear(48, [32], [[4], [40]], engine_options=options)
        x, y = world.inputs(6)
        owners = alone([0, 1, -1, 1, 0, 0])
        first, _ = world.run(x, y, owners)
        assert torch.equal(first, world.run(x, y, owners)[0])


def test_all_base_and_empty_plans() -> None:
    world = OneLinear(48, [32], [[4], [40]])
    x, y = world.inputs(3)
    world.model["p"].base = y
    with world.engine.step(world.entries(alone([0, 1, 1]))) as step:
        shape = step.shape
    assert shape is not None
    got, receipt = world.run(x, y, alone([-1, -1, -1]))
    assert torch.equal(got, y)
    assert receipt.kernel == "none"
    got, receipt = world.run(x, y, alone([-1, -1, -1]), shape=shape)
    assert torch.equal(got, y)
    assert receipt.kernel == "triton:rows"
    got, _ = world.run(x, y, alone([1, -1, 0]), shape=shape)
    close(got, world.wanted(x, y, alone([1, -1, 0])))


def test_a_step_that_does_not_fit_a_shape_is_refused() -> None:
    world = OneLinear(48, [32], [[4], [40]])
    x, y = world.inputs(2)
    with world.engine.step(world.entries(alone([0, -1]))) as step:
        shape = step.shape
    for owners in (alone([1, -1]), alone([0, 0, 0])):
        with pytest.raises(AdapterdError) as caught:
            world.run(x, y, owners, shape=shape)
        assert caught.value.code is Code.REQUEST_INVALID
    got, _ = world.run(x, y, alone([0, -1]), shape=shape)
    close(got, world.wanted(x, y, alone([0, -1])))


def test_an_input_of_another_width_is_refused() -> None:
    world = OneLinear(48, [32], [[4]])
    x, y = world.inputs(2)
    for wrong_x, wrong_y in ((x[:, :24], y), (x, torch.cat([y, y], dim=1))):
        with pytest.raises(AdapterdError) as caught:
            world.run(wrong_x, wrong_y, alone([0, -1]))
        assert caught.value.code is Code.SHAPE_MISMATCH


def test_inputs_and_outputs_with_strides() -> None:
    world = OneLinear(48, [32], [[4], [40]])
    x, y = world.inputs(6)
    owners = alone([0, 1, -1, 1, 0, 0])
    wanted = world.wanted(x, y, owners)
    strided = torch.stack([x, x + 1], dim=2)[:, :, 0]
    assert not strided.is_contiguous()
    close(world.run(strided, y, owners)[0], wanted)
    world.model["p"].base = y.view(2, 3, 32)
    with world.engine.step(world.entries(owners)):  # type: ignore[arg-type]
        got = world.model["p"](x.view(2, 3, 48))
    close(got.view(6, 32), wanted)


def test_more_new_residents_than_go_through_pinned_memory() -> None:
    world = OneLinear(16, [16], [[1 + i % 3] for i in range(STAGED_ROWS + 6)], page_bytes=1 << 12)
    check(world, alone(range(STAGED_ROWS + 6)))
    check(world, alone(range(STAGED_ROWS + 5, -1, -1)))


def test_a_standing_batch_is_planned_once() -> None:
    world = OneLinear(48, [32], [[4], [40]])
    x, y = world.inputs(2)
    leases = world.entries(alone([0, 1]))
    world.model["p"].base = y
    shapes = []
    for entries in (leases, leases, world.entries(alone([0, 1])), world.entries(alone([1, 0])), leases):
        with world.engine.step(entries) as step:  # type: ignore[arg-type]
            got = world.model["p"](x)
        shapes.append(step.shape)
        close(got, world.wanted(x, y, alone([1, 0] if entries[0][0].composition[0][0].slot else [0, 1])))
    assert len(set(shapes)) == 1


def test_another_adapter_in_the_slot() -> None:
    world = OneLinear(48, [32], [[4], [40]])
    x, y = world.inputs(2)
    world.run(x, y, alone([0, 1]))
    world.cache.evict(world.adapters[0])
    world.adapters[0] = world.cache.add({"p0": 9}, seed=77)
    assert world.adapters[0].resident.slot == 0
    got, _ = world.run(x, y, alone([0, 1]))
    close(got, world.wanted(x, y, alone([0, 1])))


def test_what_kernels_cannot_serve_is_the_references_and_told() -> None:
    world = OneLinear(48, [32], [[4], [40]], engine_options={"max_rank": 16})
    world.cache.config = type(world.cache.config)(world.page_bytes, "F32", 64)
    world.adapters.append(world.cache.add({"p0": 3}, seed=9, dtype="BF16"))
    owners: Owners = [[(0, 1.0)], [(1, 1.0)], [], [(2, 1.0)], [(0, 1.0), (2, 0.5)]]
    x, y = world.inputs(5)
    got, receipt = world.run(x, y, owners)
    close(got, world.wanted(x, y, owners))
    assert (receipt.kernel, receipt.fallback) == ("triton:rows", True)
    assert receipt.reasons == (
        "adapter is BF16, kernels read F32 (the cache's `dtype` makes them one)",
        "rank 40 has more blocks than the tables have room for",
    )
    world.engine.strict = True
    with pytest.raises(AdapterdError) as caught:
        world.run(x, y, owners)
    assert caught.value.code is Code.KERNEL_UNAVAILABLE
    assert world.cache.tickets[-1].ends == 1
    with pytest.raises(AdapterdError, match="KERNEL_UNAVAILABLE"):
        world.engine.check(world.cache.lease(world.adapters[2]))
    assert world.cache.tickets[-1].ends == 1
    world.engine.check(world.cache.lease(world.adapters[0]))
    world.run(x, y, alone([0, 0, -1, 0, 0]))


def test_float64_layers_and_gradients_are_the_references() -> None:
    world = OneLinear(48, [32], [[4]], torch.float64)
    x, y = world.inputs(2)
    got, receipt = world.run(x, y, alone([0, -1]))
    torch.testing.assert_close(got, world.wanted(x, y, alone([0, -1])))
    assert receipt.fallback
    world = OneLinear(48, [32], [[4]])
    x, y = world.inputs(2)
    got, receipt = world.run(x.requires_grad_(), y, alone([0, -1]))
    assert receipt.reasons == ("gradients are wanted",)
    got.sum().backward()
    assert x.grad is not None
    assert x.grad[0].abs().max() > 0


@pytest.mark.parametrize(("fused", "distribution"), [(True, "with base"), (False, "uniform"), (True, "skewed")])
def test_a_whole_model(distribution: str, fused: bool) -> None:
    cache = StaticCache(toy_spec(), n_pages=1500)
    owners = DISTRIBUTIONS[distribution]
    adapters = adapters_of(cache, max(owners) + 1)
    model, plain = toy(fused=fused), toy(fused=fused)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    wanted = per_row(plain, x, compositions(adapters, owners), FUSED if fused else ())
    from adapterd.gpu_cache.engine import LoRAEngine

    engine = LoRAEngine(model, cache, STACKED if fused else None, kernels="triton", batch_invariant=True)
    with engine.step(batch(cache, adapters, owners)) as step:
        got = model(x)
    assert step.receipt.kernel == "triton:tiles"
    assert step.receipt.not_run == ()
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)
