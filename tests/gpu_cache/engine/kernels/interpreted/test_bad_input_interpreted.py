"""What a step on kernels refuses, and what it never lets through."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapterd.gpu_cache.engine.kernels import launch
from adapterd.loader.errors import AdapterdError, Code
from fakes.one_linear import OneLinear, Owners, alone, close

REGIMES = [{}, {"batch_invariant": True}]


def run(world: OneLinear, x: Tensor, y: Tensor, rows: list[tuple[object, int]]) -> Tensor:
    world.model["p"].base = y
    with world.engine.step(rows):  # type: ignore[arg-type]
        return world.model["p"](x)


def test_leases_that_are_not_ready_released_or_stale_change_nothing() -> None:
    """The plan that stands on the device is the next step's, too."""
    world = OneLinear(48, [32], [[4], [5]])
    x, y = world.inputs(2)
    good, other = world.cache.lease(world.adapters[0]), world.cache.lease(world.adapters[1])
    first = run(world, x, y, [(good, 1), (None, 1)])
    waiting, released = world.cache.lease(world.adapters[0]), world.cache.lease(world.adapters[0])
    waiting.ready, released.released = False, True
    world.cache.evict(world.adapters[1])
    for lease, code in (
        (waiting, Code.LEASE_NOT_READY), (released, Code.LEASE_RELEASED), (other, Code.SLOT_STALE),
    ):  # fmt: skip
        with pytest.raises(AdapterdError) as caught:
            run(world, x, y, [(good, 1), (lease, 1)])
        assert caught.value.code is code
        assert torch.equal(run(world, x, y, [(good, 1), (None, 1)]), first)


def test_a_successor_in_the_slot_of_a_standing_batch_is_a_new_batch() -> None:
    world = OneLinear(48, [32], [[4], [5]])
    x, y = world.inputs(1)
    old = world.cache.lease(world.adapters[0])
    run(world, x, y, [(old, 1)])
    world.cache.evict(world.adapters[0])
    world.adapters[0] = world.cache.add({"p0": 7}, seed=50)
    with pytest.raises(AdapterdError, match="SLOT_STALE"):
        run(world, x, y, [(old, 1)])
    close(run(world, x, y, [(world.cache.lease(world.adapters[0]), 1)]), world.wanted(x, y, alone([0])))


def test_an_adapter_with_a_module_that_is_not_wrapped_leaves_the_tables_alone() -> None:
    world = OneLinear(48, [32, 16], [[4, 0], [4, 4]], engine_options={"targets": ["p0"]})
    x, y = world.inputs(2)
    for _ in range(2):
        with pytest.raises(AdapterdError) as caught:
            run(world, x, y, world.entries(alone([0, 1])))
        assert caught.value.code is Code.MODULE_NOT_SERVED
    close(run(world, x, y, world.entries(alone([0, -1]))), world.wanted(x, y, alone([0, -1])))


@pytest.mark.parametrize("shape", [(0, 48), (3, 48), (2, 47), (2, 0)])
def test_inputs_that_are_empty_or_of_other_sizes(shape: tuple[int, int]) -> None:
    world = OneLinear(48, [32], [[4]])
    _, y = world.inputs(2)
    with pytest.raises(AdapterdError) as caught:
        run(world, torch.zeros(shape), y, world.entries(alone([0, 0])))
    assert caught.value.code is (Code.ROWS_MISMATCH if shape[0] != 2 else Code.SHAPE_MISMATCH)


def test_an_input_on_another_device_is_refused() -> None:
    world = OneLinear(48, [32], [[4]])
    x, y = world.inputs(2)
    for wrong_x, wrong_y in ((x.to("meta"), y), (x, y.to("meta"))):
        with pytest.raises(AdapterdError) as caught:
            run(world, wrong_x, wrong_y, world.entries(alone([0, -1])))
        assert caught.value.code is Code.DEVICE_ERROR


@pytest.mark.parametrize("options", REGIMES, ids=["rows", "tiles"])
def test_an_output_that_is_not_contiguous(options: dict[str, object]) -> None:
    world = OneLinear(48, [32], [[4], [40]], engine_options=options)
    x, y = world.inputs(3)

    class Strided(type(world.model["p"])):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.base, self.base * 0 + 9], dim=2)[:, :, 0]

    world.model["p"].__class__ = Strided
    close(run(world, x, y, world.entries(alone([0, -1, 1]))), world.wanted(x, y, alone([0, -1, 1])))


@pytest.mark.parametrize("options", REGIMES, ids=["rows", "tiles"])
@pytest.mark.parametrize("rank", [1, 7, 8, 9, 63, 64, 65, 127, 128])
def test_ranks_beside_every_boundary(rank: int, options: dict[str, object]) -> None:
    world = OneLinear(48, [32], [[rank], [1]], engine_options=options)
    x, y = world.inputs(4)
    owners = alone([0, 1, -1, 0])
    close(run(world, x, y, world.entries(owners)), world.wanted(x, y, owners), ulps=4)


@pytest.mark.parametrize("rows", [15, 16, 17, 63, 64, 65, 255, 256, 257])
def test_segments_beside_every_boundary_of_tiles_and_regimes(rows: int) -> None:
    world = OneLinear(16, [16], [[3], [2]])
    x, y = world.inputs(rows + 2)
    first, last = (world.cache.lease(adapter) for adapter in world.adapters)
    got = run(world, x, y, [(first, rows), (None, 1), (last, 1)])
    close(got, world.wanted(x, y, alone([0] * rows + [-1, 1])))


@pytest.mark.parametrize("options", REGIMES, ids=["rows", "tiles"])
def test_nan_in_outputs_inputs_and_scratch_stays_where_it_is(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one composition, whose rows share a tile, and of a neighbour's adapter that is all NaN."""
    empty = torch.empty
    monkeypatch.setattr(launch.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    world = OneLinear(48, [32, 16], [[4, 20], [8, 2]], engine_options=options)
    for page in world.adapters[1].resident.pages:
        world.cache.arena[page * world.page_bytes : (page + 1) * world.page_bytes] = 0xFF
    owners: Owners = [[(0, 1.0)], [(0, 1.0)], [(1, 1.0)], [(0, 0.5), (1, 1.0)], [], [(0, 1.0)]]
    x, y = world.inputs(6)
    wanted = world.wanted(x, y, [mix if (1, 1.0) not in mix else [] for mix in owners])
    x[1], y[5] = float("nan"), float("nan")
    got = run(world, x, y, world.entries(owners))
    assert got[[1, 2, 3, 5]].isnan().all()
    close(got[[0]], wanted[[0]])
    assert torch.equal(got[4], y[4])
