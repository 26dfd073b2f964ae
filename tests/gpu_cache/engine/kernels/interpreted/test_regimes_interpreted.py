"""A step whose rows share adapters: small linears work row by row, large ones in tiles, as the shape says."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapterd.gpu_cache.engine import LoRAEngine, Receipt
from adapterd.gpu_cache.engine.device_plan import LaunchShape, Regime
from adapterd.loader.base_model import BaseSpec
from fakes.batches import batch, compositions
from fakes.merged import per_row
from fakes.static_cache import Adapter, StaticCache
from fakes.toy_models import HIDDEN, LINEARS, toy, toy_spec

WIDE, ROWS = 1792, 64


class TwoLinears(nn.Module):
    """Side by side, so that a test sees the output of each."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.narrow, self.wide = nn.Linear(16, 16), nn.Linear(WIDE, WIDE)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 40

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.narrow(x[:, :16]), self.wide(x[:, 16:])), dim=1)


class World:
    def __init__(self) -> None:
        self.model = TwoLinears()
        base = BaseSpec.from_module(self.model, id="tests/two", revision="d" * 40)
        self.cache = StaticCache(base, n_pages=64, page_bytes=1 << 18, dtype="F32")
        self.adapters = [self.cache.add({"narrow": 8, "wide": 128}, seed=seed) for seed in range(3)]
        self.x = torch.randn(ROWS, 16 + WIDE, generator=torch.Generator().manual_seed(1))

    def run(self, owners: list[int], shape: LaunchShape | None = None) -> tuple[Tensor, Receipt, LaunchShape | None]:
        with LoRAEngine(self.model, self.cache, kernels="triton") as engine:
            with engine.step(batch(self.cache, self.adapters, owners), shape=shape) as step:
                got = self.model(self.x)
            return got.detach(), step.receipt, step.shape


@pytest.fixture(autouse=True)
def without_gradients() -> object:
    with torch.no_grad():
        yield


def right(world: World, got: Tensor, owners: list[int]) -> None:
    wanted = per_row(world.model, world.x, compositions(world.adapters, owners))
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-4)


def test_each_linear_has_its_regime_and_a_graphs_shape_fixes_it() -> None:
    """Adapters that come, go and share otherwise change no linear's regime, as long as the shape is the same (I22)."""
    world = World()
    shared = [0, 1] * (ROWS // 2)
    got, receipt, shape = world.run(shared)
    right(world, got, shared)
    assert receipt.kernel == "triton:rows+tiles"
    assert shape is not None and shape.together is not None
    others = [-1, 2, 0] * 21 + [1]
    got, receipt, used = world.run(others, shape)
    right(world, got, others)
    assert (receipt.kernel, used) == ("triton:rows+tiles", shape)
    base = [row for row, owner in enumerate(others) if owner < 0]
    assert torch.equal(got[base], world.model(world.x)[base])


def test_rows_that_do_not_share_pay_nothing() -> None:
    world = World()
    world.x = world.x[:3]
    _, receipt, shape = world.run([0, 1, 2])
    assert receipt.kernel == "triton:rows"
    assert shape == LaunchShape(Regime.ROWS, 3, 1, 3, shape.items if shape else 0, 8)


def test_warm_up_makes_every_kernel_that_steps_need() -> None:
    """Counted where Triton would compile: the launcher makes no constants that it has not made before."""
    model = toy()
    cache = StaticCache(toy_spec(), n_pages=1500, dtype="F32")
    adapters: list[Adapter] = [cache.add(dict.fromkeys(LINEARS, rank), seed=rank) for rank in (1, 9, 17, 30)]
    with LoRAEngine(model, cache, kernels="triton", max_rank=32) as engine:
        engine.warm_up([3, 258, 3])
        warmed = kernels(engine)
        assert warmed
        for owners in ([0, -1, 1], [3, 3, 3], [2, 3, 0], [0] * 258, [0, 1, 2] * 86):
            x = torch.randn(len(owners), HIDDEN, generator=torch.Generator().manual_seed(1))
            with engine.step(batch(cache, adapters, owners)) as step:
                got = model(x)
            assert not step.receipt.fallback
            wanted = per_row(toy(), x, compositions(adapters, owners))
            torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)
        assert kernels(engine) == warmed


def test_few_tiles_split_k_further() -> None:
    """So that a large card has work; a shape of many tiles keeps the configuration as it is."""
    model = nn.Sequential(OrderedDict(deep=nn.Linear(4096, 32)))
    base = BaseSpec.from_module(model, id="tests/deep", revision="d" * 40)
    cache = StaticCache(base, n_pages=200, page_bytes=1 << 18, dtype="F32")
    adapters = [cache.add({"deep": 128}, seed=seed) for seed in range(9)]
    x = torch.randn(ROWS, 4096, generator=torch.Generator().manual_seed(1)) / 40
    few, many = [0, 1] * (ROWS // 2), [row % 9 for row in range(ROWS)]
    with LoRAEngine(model, cache, kernels="triton", max_rank=128) as engine:
        with engine.step(batch(cache, adapters, few)) as step:
            got = model(x)
        assert step.receipt.kernel == "triton:tiles"
        torch.testing.assert_close(got.double(), per_row(model, x, compositions(adapters, few)), rtol=0, atol=1e-4)
        assert [split(engine, batch(cache, adapters, owners)) for owners in (few, many)] == [8, 4]


def split(engine: LoRAEngine[Any], rows: list[Any]) -> int:
    """Parts of K of the engine's only linear in tiles; a warm-up makes kernels for it."""
    fast = engine._fast
    assert fast is not None
    with engine.step(rows) as step:
        assert step.shape is not None and step.shape.together is not None
    tiled = step.shape.together
    warmed = [shape.groups for shape in fast._shapes(ROWS) if shape.regime is Regime.TILES]
    assert tiled.groups in warmed
    (linear,) = fast._linears.values()
    found = fast.launcher.launch_of(linear.form, tiled, torch.float32, torch.float32).expand["SPLIT"]
    assert isinstance(found, int)
    return found


def kernels(engine: LoRAEngine[object]) -> set[object]:
    """Regime, dtypes and constants of each launch so far: what Triton keeps compiled kernels by."""
    assert engine._fast is not None
    launches = engine._fast.launcher._grids._launches
    return {
        (shape.regime, x, y, frozenset(launch.shrink.items()), frozenset(launch.expand.items()))
        for (_, shape, x, y), launch in launches.items()
    }


def test_warm_up_leaves_the_batch_as_it_is() -> None:
    world = World()
    owners = [0, 1] * (ROWS // 2)
    world.x, owners = world.x[:4], owners[:4]
    with LoRAEngine(world.model, world.cache, kernels="triton") as engine:
        rows = batch(world.cache, world.adapters, owners)
        with engine.step(rows):
            before = world.model(world.x)
        with engine.step(rows), pytest.raises(RuntimeError, match="a step is open"):
            engine.warm_up([1])
        engine.warm_up([1])
        with engine.step(rows):
            assert torch.equal(world.model(world.x), before)
        with pytest.raises(ValueError, match="0 is not a number of rows"):
            engine.warm_up([4, 0])
    with pytest.raises(RuntimeError, match="closed"):
        engine.warm_up([1])
