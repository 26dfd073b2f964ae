"""What kernels know a composition by: looked at once, right for as long as it stands, and never kept for ever."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from adapterd.gpu_cache.engine.device_tables import DeviceTables
from adapterd.gpu_cache.engine.plan import Composition, Planner, ResidentLike
from adapterd.gpu_cache.engine.shares import FIRST_SLOT, KEPT_MIXES, NOBODY, REFERENCE, Shares, StepShares
from adapterd.gpu_cache.slots import Resident
from adapterd.gpu_cache.table_shape import Matrix, TableShape
from fakes.static_cache import StaticCache, StaticLease
from fakes.toy_models import LINEARS, toy_spec

SLOTS = 8


class World:
    """Tables for one module, residents of 1, 2, 3 … blocks, and what was asked of `check`."""

    def __init__(self) -> None:
        base = toy_spec()
        cache, module = StaticCache(base, slots=SLOTS), base.module(LINEARS[0])
        assert module is not None
        shape = TableShape([Matrix(module.path, module.in_features, module.out_features)], SLOTS, 64, "F32", 4096)
        ranks = [shape.rows[0] * (1 + i) for i in range(3)]
        self.residents = [cache.add({LINEARS[0]: rank}, seed=i).resident for i, rank in enumerate(ranks)]
        self.odd = cache.add({LINEARS[0]: 4}, seed=9, dtype="BF16").resident
        self.tables = DeviceTables(shape, torch.device("cpu"))
        self.asked: list[int] = []
        self.shares = Shares(self.tables, lambda resident: self.asked.append(resident.slot))

    def single(self, index: int) -> Composition:
        return ((self.residents[index], 1.0),)


@pytest.fixture
def world() -> World:
    return World()


def test_residents_alone_are_known_by_their_slots(world: World) -> None:
    shares = world.shares.of((world.single(0), (), world.single(2), world.single(0), ((world.odd, 1.0),)))
    assert shares == [FIRST_SLOT, NOBODY, FIRST_SLOT + 2, FIRST_SLOT, REFERENCE]
    entries = world.shares.entries
    stride = world.tables.shape.stride
    assert entries[FIRST_SLOT + 2].tolist() == [0, 1, 2 * stride, 3, -1, 0, 0, 0]
    assert not entries[[NOBODY, REFERENCE], 1].any()
    assert "BF16" in world.shares.why_not([world.odd])[0]
    assert list(world.shares.unsent) == [0, 2], "the reference needs no row in the tables"


def test_a_composition_is_looked_at_once(world: World) -> None:
    batch = (world.single(0), world.single(1), ((world.residents[0], 0.5), (world.residents[2], 1.0)))
    first = world.shares.of(batch)
    assert sorted(world.asked) == [0, 1, 2]
    assert world.shares.of(batch) == first
    again = (world.single(1), world.single(0))  # other leases of the same residents
    assert world.shares.of(again) == [first[1], first[0]]
    assert len(world.asked) == 3


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_batch_has_the_shares_that_it_has_alone(world: World, seed: int) -> None:
    """Whichever entries change, whether or not every plan comes here, and when compositions are forgotten between."""
    rng, planner = random.Random(seed), Planner()
    one, two, three = world.residents
    known: list[Composition] = [
        (), world.single(0), world.single(1), ((world.odd, 1.0),), ((two, 0.5),), ((one, 1.0), (three, -2.0)),
    ]  # fmt: skip
    batch = [StaticLease(rng.choice(known)) for _ in range(24)]
    for _ in range(60):
        batch = list(batch)
        for index in rng.sample(range(len(batch)), min(len(batch), rng.choice((0, 1, 1, 2, 20)))):
            batch[index] = StaticLease(rng.choice([*known, ((one, rng.random()),)]))
        if rng.random() < 0.1:
            batch = batch[: rng.randint(8, 24)]
        plan = planner.plan(batch, (1,) * len(batch))
        if rng.random() < 0.1:
            continue
        if rng.random() < 0.05:
            world.shares._forget_mixes()
        found = world.shares.of_plan(plan)
        wanted = world.shares.of(plan.compositions)
        assert found.listed == found.array.tolist() == wanted
        assert found.distinct == {*wanted}
        assert found.lowest <= min(wanted) <= max(wanted) <= found.highest
        mixed = world.shares.mixed(found)
        assert mixed.tolist() == world.shares.mixed(StepShares.of(wanted)).tolist()
        assert found.unserved == wanted.count(NOBODY) + wanted.count(REFERENCE)
        assert found.groups == len({*wanted} - {NOBODY, REFERENCE})


def test_of_a_changed_batch_only_what_has_changed_is_looked_at(world: World) -> None:
    planner, leases = Planner(), [StaticLease(world.single(index % 2)) for index in range(12)]
    first = world.shares.of_plan(planner.plan(leases, (1,) * 12))
    looked: list[int] = []
    one = world.shares._one
    world.shares._one = lambda composition: looked.append(1) or one(composition)  # type: ignore[method-assign, func-returns-value]
    second = world.shares.of_plan(planner.plan([*leases[:-1], StaticLease(world.single(2))], (1,) * 12))
    assert looked == [1]
    assert second.listed == [*first.listed[:-1], FIRST_SLOT + 2]
    assert first.listed[-1] == FIRST_SLOT + 1, "the former step's are its own"


def test_a_fault_in_a_changed_entry_spoils_nothing(world: World) -> None:
    planner, leases = Planner(), [StaticLease(world.single(index % 2)) for index in range(12)]
    first = world.shares.of_plan(planner.plan(leases, (1,) * 12))
    beyond = StaticLease(((world.residents[0], 1e39),))  # more than float32 holds
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        world.shares.of_plan(planner.plan([beyond, *leases[1:]], (1,) * 12))
    assert world.shares.of_plan(planner.plan(leases, (1,) * 12)).listed == first.listed


def test_a_new_generation_is_looked_at_and_sent_again(world: World) -> None:
    world.shares.of((world.single(1),))
    world.tables.written(world.shares.unsent.pop(1))
    successor = replace(world.residents[1], generation=1)
    world.shares.of((((successor, 1.0),),))
    assert world.shares.unsent == {1: successor}
    assert world.asked == [1, 1]


def test_a_resident_that_is_not_served_is_asked_about_again(world: World) -> None:
    def check(resident: ResidentLike) -> None:
        raise ValueError(str(resident.slot))

    shares = Shares(world.tables, check)
    for _ in range(2):
        with pytest.raises(ValueError, match="1"):
            shares.of(((), world.single(1)))
    assert not shares.unsent


def test_compositions_are_laid_one_behind_the_other(world: World) -> None:
    one, two, three = world.residents
    mixes: tuple[Composition, ...] = (((two, 0.5),), ((one, 1.0), (three, -2.0)), ((two, 0.5),), world.single(0))
    shares = world.shares.of(mixes)
    assert shares[0] == shares[2] != shares[1]
    stride = world.tables.shape.stride
    for used, cells in (
        (shares[:3], [stride, stride + 1, 0, 2 * stride, 2 * stride + 1, 2 * stride + 2]),
        (shares, [stride, stride + 1, 0, 2 * stride, 2 * stride + 1, 2 * stride + 2]),
        (shares[1:2], [0, 2 * stride, 2 * stride + 1, 2 * stride + 2]),
    ):
        mixed = world.shares.mixed(StepShares.of(used))
        assert mixed[0].tolist() == cells
        for share in used[:2]:
            _, rows, _, blocks, start, *_ = world.shares.entries[share].tolist()
            assert rows == 1 and 0 <= start <= len(cells) - blocks
    assert mixed[1].view(np.float32).tolist() == [1.0, -2.0, -2.0, -2.0]
    assert world.shares.mixed(StepShares.of(shares[3:])).shape == (2, 0)


def test_a_fault_on_the_way_leaves_no_number_behind_for_two(world: World) -> None:
    beyond = ((world.residents[0], 1e39),)  # more than float32 holds
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        world.shares.of((beyond,))
    (other,) = world.shares.of((((world.residents[1], 0.5),),))
    with np.errstate(over="ignore"):
        (again,) = world.shares.of((beyond,))
    assert again != other
    assert world.shares.mixed(StepShares.of([other]))[0].tolist() == [
        world.tables.shape.stride,
        world.tables.shape.stride + 1,
    ]


def test_compositions_are_forgotten_before_they_are_too_many(world: World) -> None:
    one = world.residents[0]
    size = 0
    for step in range(40):
        batch: tuple[Composition, ...] = tuple([((one, 2.0 + 100 * step * (i > 0) + i),) for i in range(100)])
        shares = world.shares.of(batch)
        assert len({*shares}) == 100
        mixed = world.shares.mixed(StepShares.of(shares))[1].view(np.float32)
        assert [mixed[world.shares.entries[share, 4]] for share in shares] == [w for ((_, w),) in batch]
        size = max(size, len(world.shares.entries))
    assert size <= 2 * (SLOTS + KEPT_MIXES + 200)


def test_another_composition_at_the_same_address_is_another_one(world: World) -> None:
    """As soon as a tuple is dropped, Python may give its address to the next one."""
    for step in range(200):
        assert world.shares.of((world.single(step % 3),)) == [FIRST_SLOT + step % 3]


class Tracked(Resident):
    """One whose end can be seen."""


def test_residents_that_no_step_names_any_more_are_let_go(world: World) -> None:
    r = world.residents[0]
    gone = []
    for generation in range(20):
        tracked = Tracked(r.key, r.slot, generation, r.manifest, r.layout, r.pages)
        world.shares.of((((tracked, 1.0),), (), world.single(1)))
        gone.append(weakref.ref(tracked))
    del tracked
    gc.collect()
    assert sum(each() is not None for each in gone) <= 2 * 3
