"""How a step's plan reaches the device: once, in one copy, in the stream of the kernels; and with bounded work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

import pytest
import torch
from torch import nn

from adapterd.gpu_cache.cpu_device import CpuDevice, CpuEvent, CpuStream, InlineStream
from adapterd.gpu_cache.device import Event, Stream
from adapterd.gpu_cache.engine.device_plan import LaunchShape, Regime
from adapterd.gpu_cache.engine.layers import find_sites
from adapterd.gpu_cache.engine.plan import BatchPlan, Planner
from adapterd.gpu_cache.engine.plan_ring import SLOTS
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code
from fakes.static_cache import StaticCache, StaticLease

pytest.importorskip("triton")
from adapterd.gpu_cache.engine.fast_path import MOST_ROWS, FastPath


class Watched(CpuDevice):
    """Says what was recorded and waited for, and has the stream that the test wants; its marks may be late."""

    def __init__(self) -> None:
        super().__init__()
        self.compute_stream: Stream = InlineStream()
        self.recorded: list[Stream] = []
        self.waited: list[tuple[Stream, Event]] = []
        self.late = False

    @property
    def compute(self) -> Stream:
        return self.compute_stream

    def record(self, stream: Stream) -> Event:
        self.recorded.append(stream)
        return CpuEvent() if self.late else super().record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self.waited.append((stream, event))


class World:
    def __init__(self, layers: int = 1, slots: int = 300) -> None:
        model = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        base = BaseSpec.from_module(model, id="tests/plan", revision="a" * 40)
        self.cache = StaticCache(base, n_pages=slots, dtype="F32", slots=slots)
        self.device = self.cache.device = Watched()
        self.fast = FastPath(self.cache, find_sites(model, base, {}, None), "F32", lambda _: None, max_rank=16)
        self.planner = Planner()
        self.leases: list[StaticLease] = []

    def more(self, count: int) -> list[StaticLease]:
        """Leases of new adapters; compositions are tuples, as the cache's."""
        for _ in range(count):
            seed = len(self.leases)
            lease = self.cache.lease(self.cache.add({"0": 1 + seed % 16}, seed=seed))
            lease.composition = tuple(lease.composition)  # type: ignore[assignment]
            self.leases.append(lease)
        return self.leases[-count:]

    def plan(self, leases: Sequence[StaticLease | None], rows: int = 1) -> BatchPlan:
        return self.planner.plan(leases, (rows,) * len(leases))

    @property
    def copies(self) -> int:
        return len(self.device.recorded)


@pytest.fixture
def world() -> World:
    return World()


def test_a_standing_batch_is_sent_once(world: World) -> None:
    leases = world.more(4)
    first = world.fast.prepare(world.plan(leases))
    assert first.view is not None and first.view.shape.regime is Regime.ROWS
    assert world.fast.prepare(world.plan(list(leases))) is first
    assert world.device.recorded == [world.device.compute], "the copy is in the stream of the kernels"
    world.fast.prepare(world.plan(leases[::-1]))
    world.fast.prepare(world.plan(leases))
    assert world.copies == 3


def test_judging_sends_nothing_however_late_the_device_is(world: World) -> None:
    """A loop judges leases that have become ready while steps are under way: each took a slot of the ring."""
    leases = world.more(SLOTS + 3)
    world.device.late = True
    plans = [world.plan(leases[: n + 1]) for n in range(SLOTS)]
    standing = [world.fast.prepare(plan) for plan in plans][-1]
    copies = world.copies
    for lease in leases:
        assert world.fast.judge([lease.composition[0][0]]) == []
    assert world.copies == copies
    assert world.fast.prepare(plans[-1]) is standing


def test_each_layer_reads_cells_of_its_own() -> None:
    fast = World(layers=3).fast
    cells, shape = fast._tables.cells, fast._tables.shape
    for index in range(3):
        linear = fast._linears[str(index)]
        assert linear.a.data_ptr() - cells.data_ptr() == 8 * index * shape.entries
        assert linear.b.data_ptr() - cells.data_ptr() == 8 * (shape.plane + index * shape.entries)


def test_another_shape_is_another_plan(world: World) -> None:
    plan = world.plan(world.more(2))
    natural = world.fast.prepare(plan)
    wider = LaunchShape(Regime.ROWS, 2, 1, 2, 8, 4)
    prepared = world.fast.prepare(plan, wider)
    assert natural.view is not None and prepared.view is not None
    assert (prepared.view.shape, natural.view.shape) == (wider, LaunchShape(Regime.ROWS, 2, 1, 2, 2, 1))
    assert world.copies == 2


def test_a_step_of_the_base_sends_nothing(world: World) -> None:
    assert world.fast.prepare(world.plan([None, world.cache.lease()])).view is None
    assert world.copies == 0


@pytest.mark.parametrize("standing", [True, False])
def test_another_stream_waits_for_the_one_before(world: World, standing: bool) -> None:
    """What the kernels of the step before read must not be overwritten under them, nor read before it is there."""
    one, two = world.more(2)
    world.fast.prepare(world.plan([one]))
    assert not world.device.waited
    former, latter = world.device.compute, CpuStream("latter")
    try:
        world.device.compute_stream = latter
        world.fast.prepare(world.plan([one if standing else two]))
        assert [stream for stream, _ in world.device.waited] == [latter]
        assert world.device.recorded[1] is former, "the mark that it waits for"
        world.fast.prepare(world.plan([one]))
        assert len(world.device.waited) == 1
        world.device.compute_stream = former
        world.fast.prepare(world.plan([one]))
        assert [stream for stream, _ in world.device.waited] == [latter, former]
    finally:
        latter.close()


def test_what_a_full_ring_has_held_up_is_sent_later(world: World) -> None:
    leases = world.more(SLOTS + 1)
    world.device.late = True
    for lease in leases[:SLOTS]:
        world.fast.prepare(world.plan([lease]))
    for _ in range(2):
        with pytest.raises(AdapterdError) as caught:
            world.fast.prepare(world.plan([leases[-1]]))
        assert caught.value.code is Code.PLAN_RING_FULL
    row = world.fast._tables.row_of(leases[-1].composition[0][0].slot)
    assert not row.any()
    for slot in world.fast._ring._slots:
        assert isinstance(slot.sent, CpuEvent)
        slot.sent.set()
    world.fast.prepare(world.plan([leases[-1]]))
    assert row.any()


def test_a_step_that_does_not_fit_sends_nothing_and_spoils_nothing(world: World) -> None:
    leases = world.more(2)
    prepared = world.fast.prepare(world.plan(leases))
    assert prepared.view is not None
    with pytest.raises(AdapterdError) as caught:
        world.fast.prepare(world.plan([*leases, None]), prepared.view.shape)
    assert caught.value.code is Code.REQUEST_INVALID
    assert world.copies == 1
    again = world.fast.prepare(world.plan(leases))
    assert again.view is prepared.view
    assert world.copies == 2, "the plan on the device may be anybody's after an error"


def test_more_rows_than_the_buffers_hold_are_the_references(world: World) -> None:
    plan = world.plan([*world.more(1), None], MOST_ROWS // 2)
    assert world.fast.prepare(plan).view is not None
    longer = world.fast.prepare(world.plan([*world.leases, None], MOST_ROWS // 2 + 1))
    assert longer.view is None
    assert [s.rows for s in longer.reference] == [MOST_ROWS // 2 + 1]
    assert longer.reasons == (f"more than {MOST_ROWS} rows",)
    (lease,) = world.leases
    resident = lease.composition[0][0]
    many = tuple([(resident, 0.001 * (1 + i)) for i in range(2000)])
    big = world.fast.prepare(world.planner.plan([StaticLease(many)], (256,)))  # type: ignore[arg-type]
    assert (big.view, big.reasons) == (None, ("more blocks than the plan's buffers hold",))


def test_its_memory_is_known(world: World) -> None:
    shape = world.fast._tables.shape
    assert world.fast.nbytes == shape.nbytes + world.fast._plan.memory.nbytes
    assert shape.nbytes == world.fast._tables.cells.numel() * 8


def calls(world: World, leases: list[StaticLease], changed: list[StaticLease]) -> int:
    """Of Python and C functions, while a batch in which one entry has changed is planned and sent."""
    world.fast.prepare(world.plan(changed))
    world.fast.prepare(world.plan(leases))
    count = 0

    def profile(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(profile)
    try:
        world.fast.prepare(world.plan(changed))
    finally:
        sys.setprofile(None)
    return count


def test_the_work_of_a_changed_batch_does_not_grow_with_rows_or_layers() -> None:
    found = {}
    for layers, rows in ((1, 64), (1, 256), (12, 64)):
        world = World(layers)
        leases = world.more(rows + 1)
        found[layers, rows] = calls(world, leases[:-1], [*leases[1:-1], leases[-1]])
    assert len({*found.values()}) == 1, found
    assert found[1, 64] <= 110
    assert torch.is_tensor(world.fast._plan.memory)
