"""Plans, read back as the kernels read them: every row gets the cells it should, whatever the batch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from adapterd.gpu_cache.engine.device_plan import (
    DevicePlan,
    LaunchShape,
    Regime,
    Work,
    fill,
    fits,
    natural_shape,
)
from adapterd.gpu_cache.engine.plan import BatchPlan, build_plan
from adapterd.gpu_cache.slots import Resident
from fakes.static_cache import StaticCache, StaticLease
from fakes.toy_models import LINEARS, toy_spec

STRIDE = 1000
BLOCKS = [1, 2, 1, 5, 3, 1, 8, 2]

Cells = list[tuple[int, float]]  # (cell, weight)


@pytest.fixture(scope="module")
def residents() -> list[Resident]:
    cache = StaticCache(toy_spec())
    return [cache.add({LINEARS[0]: 1}, seed=i).resident for i in range(len(BLOCKS))]


def plan_of(residents: list[Resident], mixes: Sequence[tuple[list[tuple[int, float]], int]]) -> BatchPlan:
    leases = [(StaticLease([(residents[i], w) for i, w in mix]) if mix else None, rows) for mix, rows in mixes]
    return build_plan(leases)


def wanted(mixes: Sequence[tuple[list[tuple[int, float]], int]]) -> list[Cells]:
    return [
        [(slot * STRIDE + block, weight) for slot, weight in mix for block in range(BLOCKS[slot])]
        for mix, rows in mixes
        for _ in range(rows)
    ]


def work_of(plan: BatchPlan) -> Work:
    return Work.of([s for s in plan.segments if s.components], plan.rows, STRIDE, BLOCKS)


def cells_of(entry: Sequence[int], parts: Sequence[int], weights: Sequence[float], blocks: int) -> Cells:
    _, _, first, _, start, *_ = entry
    if start < 0:
        return [(first + block, 1.0) for block in range(blocks)]
    return [(parts[start + block], weights[start + block]) for block in range(blocks)]


def read(shape: LaunchShape, buffer: np.ndarray) -> tuple[list[Cells], list[Cells]]:
    """What `expand` adds to each row, and what `shrink` makes for it."""
    at = shape.places
    tiles = buffer[at[0] :][: shape.tiles * 8].reshape(-1, 8)
    parts = buffer[at[3] :][: shape.items]
    weights = buffer[at[4] :][: shape.items].view(np.float32)
    expanded: list[Cells] = [[] for _ in range(shape.rows)]
    shrunk: list[Cells] = [[] for _ in range(shape.rows)]
    for tile in tiles[tiles[:, 1] > 0].tolist():
        rows = [tile[0]]
        if shape.regime is Regime.TILES:
            assert tile[1] <= shape.tile_rows
            rows = buffer[at[2] :][: shape.rows].tolist()[tile[0] : tile[0] + tile[1]]
        for row in rows:
            assert not expanded[row], "a row in two tiles"
            expanded[row] = cells_of(tile, parts, weights, tile[3])
    if shape.regime is Regime.TILES:
        return expanded, expanded
    items = buffer[at[1] :][: shape.items * 8].reshape(-1, 8)
    for item in items[items[:, 1] > 0].tolist():
        blocks, block = item[3] >> 16, item[3] & 65535
        shrunk[item[0]].append(cells_of(item, parts, weights, blocks)[block])
    return expanded, shrunk


def a_batch(rng: random.Random) -> list[tuple[list[tuple[int, float]], int]]:
    weights = (1.0, 1.0, 0.5, -2.0)
    mixes = [
        [(slot, rng.choice(weights)) for slot in rng.sample(range(len(BLOCKS)), rng.choice((0, 1, 1, 1, 2, 3)))]
        for _ in range(rng.randint(1, 6))
    ]
    return [(rng.choice(mixes), rng.choice((1, 1, 1, 2, 17, 40))) for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("regime", list(Regime))
def test_every_row_gets_its_cells(residents: list[Resident], regime: Regime) -> None:
    """Into one buffer, so that what an earlier plan left there would show."""
    rng, buffer = random.Random(7), np.full(1 << 16, 12345, np.int32)
    for _ in range(120):
        mixes = a_batch(rng)
        work = work_of(plan_of(residents, mixes))
        shape = natural_shape(work, regime, 16 if regime is Regime.TILES else 1)
        assert fits(work, shape)
        sent = fill(shape, work, buffer)
        assert sent <= shape.places[-1]
        expanded, shrunk = read(shape, buffer)
        assert expanded == wanted(mixes)
        assert shrunk == wanted(mixes)


@pytest.mark.parametrize("regime", list(Regime))
def test_a_wider_shape_holds_the_same_plan(residents: list[Resident], regime: Regime) -> None:
    rng, buffer = random.Random(8), np.full(1 << 16, 12345, np.int32)
    for _ in range(60):
        mixes = a_batch(rng)
        rows = sum(n for _, n in mixes)
        work = work_of(plan_of(residents, mixes))
        shape = LaunchShape(regime, rows, 16 if regime is Regime.TILES else 1, rows, 24 * rows, 32)
        if fits(work, shape):
            fill(shape, work, buffer)
            assert read(shape, buffer)[1] == wanted(mixes)


def test_what_does_not_fit() -> None:
    work = Work(4, begin=[0], length=[4], first=[0], blocks=[3], start=[-1], group=[0], groups=1)
    shape = natural_shape(work, Regime.ROWS, 1)
    assert (shape.tiles, shape.items, shape.blocks) == (4, 16, 4)
    for other in (
        LaunchShape(Regime.ROWS, 5, 1, 5, 16, 4),
        LaunchShape(Regime.ROWS, 4, 1, 4, 8, 4),
        LaunchShape(Regime.ROWS, 4, 1, 4, 16, 2),
        LaunchShape(Regime.TILES, 4, 2, 1, 16, 4),
    ):
        assert not fits(work, other)


def test_lists_grow_by_steps() -> None:
    """1, 1½, 2, 4, 8 times the rows: few shapes for many batches."""
    sizes = set()
    for blocks in range(1, 9):
        work = Work(64, begin=[0], length=[64], first=[0], blocks=[blocks], start=[-1], group=[0], groups=1)
        sizes.add(natural_shape(work, Regime.ROWS, 1).items)
    assert sizes == {64, 128, 256, 512}
    half = Work(64, begin=[0, 32], length=[32, 32], first=[0, 8], blocks=[1, 2], start=[-1, -1], group=[0, 1], groups=2)
    assert natural_shape(half, Regime.ROWS, 1).items == 96


def test_addresses_depend_on_the_shape_alone() -> None:
    """I22."""
    plan = DevicePlan(256, torch.device("cpu"))
    shape = LaunchShape(Regime.ROWS, 64, 1, 64, 128, 2)
    first = plan.view(shape)
    for other in range(1, 60):
        plan.view(LaunchShape(Regime.TILES, other, 16, other, 16, 1))
    again = plan.view(shape)
    for name in ("tiles", "items", "parts", "weights"):
        assert getattr(first, name).data_ptr() == getattr(again, name).data_ptr()
        assert (getattr(first, name).data_ptr() - plan.memory.data_ptr()) % 128 == 0
    assert plan.holds(shape)
    assert not plan.holds(LaunchShape(Regime.ROWS, 257, 1, 257, 257, 1))
