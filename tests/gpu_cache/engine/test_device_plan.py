"""Plans, read back as the kernels read them: every row gets the cells it should, whatever the batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from adapterd.gpu_cache.engine.device_plan import DevicePlan, LaunchShape, Regime
from adapterd.gpu_cache.engine.device_tables import DeviceTables
from adapterd.gpu_cache.engine.lists import Work, fill, fits, natural_shape, shape_of, with_tiles
from adapterd.gpu_cache.engine.plan import Composition
from adapterd.gpu_cache.engine.shares import Shares, StepShares
from adapterd.gpu_cache.slots import Resident
from adapterd.gpu_cache.table_shape import Matrix, TableShape
from fakes.static_cache import StaticCache
from fakes.toy_models import LINEARS, toy_spec

BLOCKS = [1, 2, 1, 5, 3, 1, 8, 2]

Cells = list[tuple[int, float]]  # (cell, weight)
Batch = Sequence[tuple[list[tuple[int, float]], int]]  # (slots with weights, rows) by entry


class Made:
    """Residents whose blocks are as many as `BLOCKS` says, and their shares."""

    def __init__(self) -> None:
        base = toy_spec()
        cache, module = StaticCache(base), base.module(LINEARS[0])
        assert module is not None
        shape = TableShape([Matrix(module.path, module.in_features, module.out_features)], 64, 128, "F32", 4096)
        self.residents: list[Resident] = [
            cache.add({LINEARS[0]: shape.rows[0] * blocks}, seed=i).resident for i, blocks in enumerate(BLOCKS)
        ]
        self.stride = shape.stride
        self.shares = Shares(DeviceTables(shape, torch.device("cpu")), lambda _: None)

    def work(self, batch: Batch) -> Work:
        compositions: tuple[Composition, ...] = tuple(
            tuple((self.residents[slot], weight) for slot, weight in mix) for mix, _ in batch
        )
        shares = StepShares.of(self.shares.of(compositions))
        lengths = tuple(rows for _, rows in batch)
        return Work(shares, lengths, sum(lengths), self.shares.entries, self.shares.mixed(shares))

    def wanted(self, batch: Batch) -> list[Cells]:
        return [
            [(slot * self.stride + block, weight) for slot, weight in mix for block in range(BLOCKS[slot])]
            for mix, rows in batch
            for _ in range(rows)
        ]


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


def cells_of(entry: Sequence[int], parts: Sequence[int], weights: Sequence[float], blocks: int) -> Cells:
    _, _, first, _, start, *_ = entry
    if start < 0:
        return [(first + block, 1.0) for block in range(blocks)]
    return [(parts[start + block], weights[start + block]) for block in range(blocks)]


def read(shape: LaunchShape, buffer: np.ndarray) -> list[list[Cells]]:
    """What kernels add to each row: `expand` and `shrink` of rows, tiles."""
    at, found = shape.places, []
    parts = buffer[at.parts :][: shape.items]
    weights = buffer[at.weights :][: shape.items].view(np.float32)
    if shape.regime is Regime.ROWS:
        expanded: list[Cells] = [[] for _ in range(shape.rows)]
        for tile in live(buffer[at.by_row :], shape.rows):
            assert tile[1] == 1 and not expanded[tile[0]]
            expanded[tile[0]] = cells_of(tile, parts, weights, tile[3])
        shrunk: list[Cells] = [[] for _ in range(shape.rows)]
        for item in live(buffer[at.items :], shape.items):
            blocks, block = item[3] >> 16, item[3] & 65535
            shrunk[item[0]].append(cells_of(item, parts, weights, blocks)[block])
        found += [expanded, shrunk]
    if shape.tiled is not None:
        tiled: list[Cells] = [[] for _ in range(shape.rows)]
        order = buffer[at.order :][: shape.rows].tolist()
        for tile in live(buffer[at.tiles :], shape.tiled.tiles):
            assert tile[1] <= shape.tiled.tile_rows
            for row in order[tile[0] : tile[0] + tile[1]]:
                assert not tiled[row], "a row in two tiles"
                tiled[row] = cells_of(tile, parts, weights, tile[3])
        found.append(tiled)
    return found


def live(entries: np.ndarray, count: int) -> list[list[int]]:
    found = entries[: count * 8].reshape(-1, 8)
    return found[found[:, 1] > 0].tolist()


def a_batch(rng: random.Random) -> list[tuple[list[tuple[int, float]], int]]:
    weights = (1.0, 1.0, 0.5, -2.0)
    mixes = [
        [(slot, rng.choice(weights)) for slot in rng.sample(range(len(BLOCKS)), rng.choice((0, 1, 1, 1, 2, 3)))]
        for _ in range(rng.randint(1, 6))
    ]
    return [(rng.choice(mixes), rng.choice((1, 1, 1, 2, 17, 40))) for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("regime", list(Regime))
def test_every_row_gets_its_cells(made: Made, regime: Regime) -> None:
    """Into one buffer, so that what an earlier plan left there would show."""
    rng, buffer = random.Random(7), np.full(1 << 16, 12345, np.int32)
    both = 0
    for index in range(120):
        mixes = a_batch(rng)
        work = made.work(mixes)
        shape = natural_shape(work, regime, 16 if regime is Regime.TILES else 1)
        if regime is Regime.ROWS and index % 2:
            shape = with_tiles(shape, work, 16)
            both += shape.together is not None
        assert fits(work, shape)
        sent = fill(shape, work, buffer)
        assert sent == (shape.places.end if work.parts else shape.places.parts)
        assert all(each == made.wanted(mixes) for each in read(shape, buffer))
    assert both > 20 or regime is Regime.TILES


@pytest.mark.parametrize("regime", list(Regime))
def test_a_wider_shape_holds_the_same_plan(made: Made, regime: Regime) -> None:
    rng, buffer = random.Random(8), np.full(1 << 16, 12345, np.int32)
    for _ in range(60):
        mixes = a_batch(rng)
        rows = sum(n for _, n in mixes)
        work = made.work(mixes)
        together = LaunchShape(Regime.TILES, rows, 16, rows, 0, 32) if regime is Regime.ROWS else None
        shape = LaunchShape(regime, rows, 16 if regime is Regime.TILES else 1, rows, 24 * rows, 32, together)
        if fits(work, shape):
            fill(shape, work, buffer)
            assert all(each == made.wanted(mixes) for each in read(shape, buffer))


def test_what_does_not_fit(made: Made) -> None:
    work = made.work([([(4, 1.0)], 4)])
    shape = natural_shape(work, Regime.ROWS, 1)
    assert (shape.tiles, shape.items, shape.blocks) == (4, 16, 4)
    for other in (
        LaunchShape(Regime.ROWS, 5, 1, 5, 16, 4),
        LaunchShape(Regime.ROWS, 4, 1, 4, 8, 4),
        LaunchShape(Regime.ROWS, 4, 1, 4, 16, 2),
        LaunchShape(Regime.TILES, 4, 2, 1, 16, 4),
        LaunchShape(Regime.ROWS, 4, 1, 4, 16, 4, LaunchShape(Regime.TILES, 4, 2, 1, 0, 4)),
    ):
        assert not fits(work, other)
    assert fits(work, LaunchShape(Regime.ROWS, 4, 1, 4, 12, 4, LaunchShape(Regime.TILES, 4, 2, 2, 0, 4)))
    mixed = made.work([([(4, 0.5)], 1), ([], 3)])
    assert fits(mixed, LaunchShape(Regime.TILES, 4, 16, 1, 3, 4))
    assert not fits(mixed, LaunchShape(Regime.TILES, 4, 16, 1, 2, 4))


def test_lists_grow_by_steps(made: Made) -> None:
    """1, 1½, 2, 4, 8 times the rows: few shapes for many batches."""
    slots = [BLOCKS.index(blocks) for blocks in (1, 2, 3, 5, 8)]
    sizes = [natural_shape(made.work([([(slot, 1.0)], 64)]), Regime.ROWS, 1).items for slot in slots]
    assert sizes == [64, 128, 256, 512, 512]
    half = made.work([([(0, 1.0)], 32), ([(1, 1.0)], 32)])
    assert natural_shape(half, Regime.ROWS, 1).items == 96


@pytest.mark.parametrize(("entries", "tiles"), [(1, 8), (5, 8), (16, 16), (33, 40), (48, 48), (49, None), (64, None)])
def test_tiles_beside_rows_go_by_eighths(made: Made, entries: int, tiles: int | None) -> None:
    """Distinct weights make compositions that share no tile."""
    counts = [64 - entries + 1] + [1] * (entries - 1)
    work = made.work([([(0, 2.0 + i)], count) for i, count in enumerate(counts)])
    shape = with_tiles(natural_shape(work, Regime.ROWS, 1), work, 64)
    assert (shape.together.groups if shape.together else None) == tiles
    assert shape.together is None or shape.together.tiles == 64, "room for rows that do not share"
    assert fits(made.work([([(0, 2.0 + i)], 1) for i in range(64)]), shape)
    half = made.work([([(0, 2.0 + i)], 2 * count) for i, count in enumerate(counts)])
    wide = with_tiles(natural_shape(half, Regime.ROWS, 1), half, 128)
    assert wide.together is None or wide.together.tiles == wide.together.groups


@pytest.mark.parametrize("length", [1, 2])
def test_rows_of_the_base_share_no_adapter(made: Made, length: int) -> None:
    """Tiles are asked for where at least a quarter of the rows have an adapter that another row has, too."""
    asked: list[int] = []

    def want_tiles(shape: LaunchShape, groups: int) -> bool:
        asked.append(groups)
        return False

    for slots in ([0, 1, 2, 3, -1, -1, -1, -1], [0, 0, 1, 1, -1, -1, -1, -1], [0, 1, 2, 3, 4, 5, -1, -1]):
        batch = [([(slot, 1.0)] if slot >= 0 else [], length) for slot in slots]
        shape_of(made.work(batch), want_tiles, batch_invariant=False)
    alone, shared, most = 8 * length - 4 * length + 4, 8 * length - 4 * length + 2, 8 * length - 6 * length + 6
    assert asked == ([shared] if length == 1 else [alone, shared, most])


def test_equal_shapes_are_one_key_in_another_process_too(made: Made) -> None:
    """Hashes are kept with a shape, and words hash otherwise in each process: they are no part of it."""
    work = made.work([([(0, 1.0)], 1)] * 8)
    shape = with_tiles(natural_shape(work, Regime.ROWS, 1), work, 16)
    assert shape.together is not None
    assert {shape: 1}[replace(shape)] == 1
    assert hash(shape) == hash(replace(shape, regime=Regime.TILES))
    assert replace(shape, regime=Regime.TILES) != shape != replace(shape, together=None)


def test_shapes_that_are_remembered_are_bounded() -> None:
    plan = DevicePlan(64, torch.device("cpu"))
    for items in range(5000):
        plan.view(LaunchShape(Regime.ROWS, 64, 1, 64, items, 1))
    assert len(plan._views) <= 4097


def test_addresses_depend_on_the_shape_alone() -> None:
    """I22."""
    plan = DevicePlan(256, torch.device("cpu"))
    shape = LaunchShape(Regime.ROWS, 64, 1, 64, 128, 2)
    first = plan.view(shape)
    for other in range(1, 60):
        plan.view(LaunchShape(Regime.TILES, other, 16, other, 16, 1))
    again = plan.view(LaunchShape(Regime.ROWS, 64, 1, 64, 128, 2))
    both = plan.view(replace(shape, together=LaunchShape(Regime.TILES, 64, 16, 8, 0, 2)))
    assert first is not None and again is not None and both is not None and both.together is not None
    assert both.tiles.data_ptr() == both.together.tiles.data_ptr() - 4 * both.shape.places.tiles
    assert (len(both.together.tiles), len(both.together.order), len(both.together.parts)) == (64, 64, 128)
    for name in ("tiles", "items", "parts", "weights"):
        assert getattr(first, name).data_ptr() == getattr(again, name).data_ptr()
        assert (getattr(first, name).data_ptr() - plan.memory.data_ptr()) % 128 == 0
    assert plan.view(LaunchShape(Regime.ROWS, 257, 1, 257, 257, 1)) is None
    assert plan.view(LaunchShape(Regime.ROWS, 64, 1, 64, 1 << 20, 1)) is None
