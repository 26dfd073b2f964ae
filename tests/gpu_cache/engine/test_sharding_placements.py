"""How weights of distributed models are read, and what is refused: on one of two ranks that exist in name only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.sharding import sharding_of
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.sharding import WHOLE, Rule, Sharding
from fakes.static_cache import StaticCache

RANK, SIZE = 1, 2


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Collectives do nothing: these tests look at shapes, and at what is refused before anything runs."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=SIZE)
    yield init_device_mesh("cpu", (SIZE,))
    dist.destroy_process_group()


class Pair(nn.Module):
    def __init__(self, inner: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, inner, bias=False), nn.Linear(inner, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def pair(mesh: DeviceMesh, inner: int = 8, **placements: Placement) -> Pair:
    model = Pair(inner).requires_grad_(False)
    for name, placement in placements.items():
        linear = model.get_submodule(name)
        weight = distribute_tensor(linear.weight, mesh, [placement], src_data_rank=None)
        linear.weight = nn.Parameter(weight, requires_grad=False)
    return model


def cache(sharding: Sharding, inner: int = 8) -> StaticCache:
    base = BaseSpec.from_module(Pair(inner), id="tests/pair", revision="c" * 40)
    return StaticCache(base, n_pages=16, sharding=sharding)


COLUMN, ROW = Rule("up", "column", 2), Rule("down", "row", 2)


def test_a_model_says_how_it_is_cut(mesh: DeviceMesh) -> None:
    assert sharding_of(Pair()) == WHOLE
    assert sharding_of(pair(mesh, up=Replicate())) == WHOLE
    assert sharding_of(pair(mesh, up=Shard(0), down=Shard(1))) == Sharding(RANK, SIZE, (COLUMN, ROW))
    packed = sharding_of(pair(mesh, up=_StridedShard(0, split_factor=2)))
    assert packed.rules == (Rule("up", "column", 2, (4, 4)),)


def test_a_model_that_says_the_same_is_served(mesh: DeviceMesh) -> None:
    for placement in (Shard(0), _StridedShard(0, split_factor=2)):
        model = pair(mesh, up=placement, down=Shard(1))
        with LoRAEngine(model, cache(sharding_of(model))) as engine:
            assert engine.served == {"up", "down"}


@pytest.mark.parametrize(
    ("placements", "sharding", "code"),
    [
        ({"up": Shard(0), "down": Shard(1)}, WHOLE, Code.BASE_TABLE_INVALID),
        ({"up": Shard(0)}, Sharding(RANK, SIZE, (COLUMN, ROW)), Code.BASE_TABLE_INVALID),
        ({"up": Shard(1)}, Sharding(RANK, SIZE, (COLUMN,)), Code.BASE_TABLE_INVALID),
        ({"up": Shard(0)}, Sharding(0, SIZE, (COLUMN,)), Code.SETTINGS_INVALID),  # as wide, and not the same outputs
        ({"up": _StridedShard(0, split_factor=2)}, Sharding(RANK, SIZE, (COLUMN,)), Code.SETTINGS_INVALID),
        ({"up": Shard(0)}, Sharding(RANK, SIZE, (Rule("up", "column", 2, (4, 4)),)), Code.SETTINGS_INVALID),
        ({"up": Partial()}, WHOLE, Code.SETTINGS_INVALID),
    ],
)
def test_a_sharding_that_is_not_the_models_is_refused(
    mesh: DeviceMesh, placements: dict[str, Placement], sharding: Sharding, code: Code
) -> None:
    with pytest.raises(AdapterdError) as refused:
        LoRAEngine(pair(mesh, **placements), cache(sharding))
    assert refused.value.code is code


def test_a_fused_linear_that_is_cut_across_its_parts_is_refused(mesh: DeviceMesh) -> None:
    """The first rank would hold q and a piece of k: as wide as its shares of both."""
    parts = nn.ModuleDict({"a": nn.Linear(6, 4, bias=False), "b": nn.Linear(6, 4, bias=False)})
    base = BaseSpec.from_module(parts, id="tests/parts", revision="c" * 40)
    sharding = Sharding.of(RANK, SIZE, column=["a", "b"])
    fused = {}
    for name, placement in (("plain", Shard(0)), ("strided", _StridedShard(0, split_factor=2))):
        linear = nn.Linear(6, 8, bias=False)
        linear.weight = nn.Parameter(distribute_tensor(linear.weight, mesh, [placement], src_data_rank=None))
        fused[name] = nn.ModuleDict({"ab": linear})
    LoRAEngine(fused["strided"], StaticCache(base, sharding=sharding), {"ab": ["a", "b"]}).close()
    with pytest.raises(AdapterdError, match="cut across its parts") as refused:
        LoRAEngine(fused["plain"], StaticCache(base, sharding=sharding), {"ab": ["a", "b"]})
    assert refused.value.code is Code.SETTINGS_INVALID


def test_uneven_shards_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(AdapterdError, match="7 features cannot be cut into 2") as refused:
        sharding_of(pair(mesh, 7, up=Shard(0)))
    assert refused.value.code is Code.SETTINGS_INVALID


def test_a_forward_that_somebody_replaced_may_hide_a_reduction(mesh: DeviceMesh) -> None:
    model = pair(mesh, up=Shard(0), down=Shard(1))
    inner = model.down.forward
    model.down.forward = lambda x: inner(x)  # type: ignore[method-assign]  # noqa: PLW0108 - a wrapper, as hooks are
    held = cache(sharding_of(model))
    with pytest.raises(AdapterdError, match="reduced") as refused:
        LoRAEngine(model, held)
    assert refused.value.code is Code.MODULE_NOT_SERVED
    assert not model.up._forward_hooks
    LoRAEngine(model, held, reduced={"down": dist.all_reduce}).close()
    LoRAEngine(model, held, targets=["up"]).close()


def test_a_name_in_reduced_that_fits_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="reduced names no linear"):
        LoRAEngine(Pair(), cache(WHOLE), reduced={"o_proj": dist.all_reduce})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x, mesh: distribute_tensor(x, mesh, [Replicate()], src_data_rank=None), "row-parallel"),
        (lambda x, mesh: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None), "row-parallel"),
    ],
)
def test_an_output_that_is_not_partial_is_refused_where_a_row_parallel_layers_should_be(
    mesh: DeviceMesh, make: Callable[[Tensor, DeviceMesh], Any], said: str
) -> None:
    """Added to a whole output, the partial delta would lack the other ranks' parts."""
    from adapterd.gpu_cache.engine.sharding.joining import LocalHook

    hook = LocalHook("down", "row", lambda module, args, kwargs, y: y)
    with pytest.raises(AdapterdError, match=said) as refused:
        hook(nn.Identity(), [torch.ones(2, 4)], {}, make(torch.ones(2, 6), mesh))
    assert refused.value.code is Code.MODULE_NOT_SERVED
