"""The copy queue on the simulated device: two streams, their fences, pieces, and what is lost."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Condition

import pytest
import torch

from adapterd.gpu_cache.copies import CopyQueue, Transfer
from adapterd.gpu_cache.device import Device, Event, Run, Stream
from adapterd.gpu_cache.fences import OPEN, Fence
from adapterd.gpu_cache.pages import Allotment
from adapterd.gpu_cache.records import Entry
from adapterd.loader.errors import Code, error
from adapterd.loader.identity import BasePin, VersionKey
from fakes.devices import COPY_STREAMS, POISON, DefectiveDevice, SimulatedDevice, SimulatedEvent

PAGE, ARENA, SLAB = 16, 16, 80
SEEDS = range(40)
BASE = BasePin("tests/tiny", "a" * 40, "b" * 64)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Fixture:
    """A queue over a simulated device, a slab whose page i is filled with i, and a clock."""

    def __init__(self, device: SimulatedDevice | DefectiveDevice, arena: int = ARENA) -> None:
        self.device, self.clock = device, Clock()
        self.arena = device.allocate_arena(arena * PAGE)
        self.slab = device.allocate_host(SLAB * PAGE)
        self.slab.copy_(torch.arange(SLAB, dtype=torch.uint8).repeat_interleave(PAGE))
        self.queue = CopyQueue(device, self.arena, PAGE, Condition(), self.clock)
        self.queue.open()

    def add(
        self, sources: Sequence[int], targets: Sequence[int], fence: Fence = OPEN, scrub: Sequence[int] = ()
    ) -> Transfer:
        entry = Entry(VersionKey("acme", BASE, f"{len(sources):064x}"))
        transfer = Transfer(entry, self.slab, tuple(sources), Allotment(tuple(targets), fence, tuple(scrub)))
        self.queue.add(transfer)
        return transfer

    def page(self, index: int) -> int:
        """What fills a page of the arena; it must be one value."""
        page = self.arena[index * PAGE : (index + 1) * PAGE]
        assert int(page.min()) == int(page.max())
        return int(page[0])

    def landed(self) -> list[Entry]:
        return [each.entry for each in self.queue.landed()]


def fixture(seed: int = 0, **defect: object) -> Fixture:
    return Fixture(DefectiveDevice(SimulatedDevice(seed), **defect))  # type: ignore[arg-type]


@pytest.mark.parametrize("max_pages", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_every_page_arrives_whatever_the_pieces(count: int, max_pages: int | None) -> None:
    f = fixture()
    sources, targets = range(40, 40 + count), [(5 * i + 3) % ARENA for i in range(count)]
    transfer = f.add(sources, targets)
    while transfer.copied_by is None:
        f.queue.issue(max_pages)
        assert f.queue.busy
    f.device.drain()
    assert [f.page(target) for target in targets] == list(sources)
    assert f.landed() == [transfer.entry]
    assert f.landed() == []
    assert not f.queue.busy
    assert sum(f.page(page) != 0 for page in range(ARENA)) == count


class _Log(DefectiveDevice):
    """Keeps what was enqueued, by stream."""

    def __init__(self, inner: SimulatedDevice) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []
        self.copy_runs = self._copy_runs  # type: ignore[method-assign]
        self.zero = self._zero  # type: ignore[method-assign]

    def _note(self, stream: Stream, what: str) -> None:
        self.calls.append((stream.name, what))  # type: ignore[attr-defined]

    def _copy_runs(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int
    ) -> None:
        self._note(stream, " ".join(f"{source}>{target}x{length}" for source, target, length in runs))
        self.inner.copy_runs(stream, dst, src, runs, page_bytes)

    def _zero(self, stream: Stream, dst: torch.Tensor) -> None:
        self._note(stream, f"zero {dst.storage_offset() // PAGE}x{dst.numel() // PAGE}")
        self.inner.zero(stream, dst)

    def record(self, stream: Stream) -> Event:
        self._note(stream, "record")
        return super().record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._note(stream, "wait")
        super().wait(stream, event)


def log_of(f: Fixture) -> dict[str, list[str]]:
    assert isinstance(f.device, _Log)
    return {name: [what for stream, what in f.device.calls if stream == name] for name in COPY_STREAMS}


def test_each_stream_gets_half_of_each_piece_as_one_batch_behind_the_whole_fence() -> None:
    f = Fixture(_Log(SimulatedDevice()))
    fence = Fence(tuple(f.device.inner.record(f.device.compute) for _ in range(2)))
    f.add(range(8), [0, 1, 4, 5, 8, 9, 12, 13], fence)
    f.queue.issue(4)
    f.queue.issue(4)
    assert log_of(f) == {
        "copy-1": ["wait", "wait", "0>0x2", "4>8x2", "record"],
        "copy-2": ["wait", "wait", "2>4x2", "6>12x2", "record"],
    }


@pytest.mark.parametrize(("pages", "pieces"), [(16, [16]), (17, [8, 9]), (80, [8, 72])])
def test_of_many_pages_a_few_go_ahead_so_that_the_link_is_busy_meanwhile(pages: int, pieces: list[int]) -> None:
    f = Fixture(_Log(SimulatedDevice()), arena=2 * pages)
    transfer = f.add(range(pages), range(0, 2 * pages, 2))
    f.queue.issue(None)
    wanted: dict[str, list[str]] = {"copy-1": [], "copy-2": []}
    begin = 0
    for piece in pieces:
        cut, end = begin + (piece + 1) // 2, begin + piece
        for name, part in zip(wanted, (range(begin, cut), range(cut, end)), strict=True):
            wanted[name].append(" ".join(f"{i}>{2 * i}x1" for i in part))
        begin = end
    assert log_of(f) == {name: [*batches, "record"] for name, batches in wanted.items()}
    f.device.drain()
    assert f.landed() == [transfer.entry]
    assert [f.page(2 * i) for i in range(pages)] == list(range(pages))


def test_a_page_is_scrubbed_in_the_stream_that_fills_it_and_before_it_does() -> None:
    f = Fixture(_Log(SimulatedDevice()))
    f.add(range(6), [0, 1, 2, 4, 5, 6], scrub=[1, 2, 4, 6])
    f.queue.issue(None)
    assert log_of(f) == {
        "copy-1": ["zero 1x2", "0>0x3", "record"],
        "copy-2": ["zero 4x1", "zero 6x1", "3>4x3", "record"],
    }


def test_a_page_alone_needs_one_stream() -> None:
    f = Fixture(_Log(SimulatedDevice()))
    transfer = f.add([7], [3])
    f.queue.issue(None)
    assert log_of(f) == {"copy-1": ["7>3x1", "record"], "copy-2": []}
    assert transfer.copied_by is not None
    assert len(transfer.copied_by.events) == 1


def test_neighbours_go_in_one_piece_and_the_streams_take_turns() -> None:
    f = Fixture(_Log(SimulatedDevice()))
    fence = Fence((f.device.inner.record(f.device.compute),))
    for first in (0, 4, 8):
        f.add(range(first, first + 4), range(first, first + 4), fence, scrub=[first])
    f.queue.issue(None)
    log = {name: [what for what in log if what != "wait"] for name, log in log_of(f).items()}
    assert log == {
        "copy-1": ["zero 0x1", "0>0x4", "record", "zero 8x1", "8>8x4", "record"],
        "copy-2": ["zero 4x1", "4>4x4", "record"],
    }
    waits = {name: each.count("wait") for name, each in log_of(f).items()}
    assert waits == {"copy-1": 2, "copy-2": 1}, "each waits for what it writes"


@pytest.mark.parametrize("late", COPY_STREAMS)
def test_a_transfer_has_landed_only_when_both_halves_have(late: str) -> None:
    f, gate = fixture(), SimulatedEvent()
    inner = f.device.inner  # type: ignore[union-attr]
    (late_stream,) = [s for s in inner._streams if s.name == late]
    inner.wait(late_stream, gate)
    transfer = f.add(range(4), [0, 1, 3, 4])
    f.queue.issue(None)
    while inner.run(1):
        pass
    assert f.landed() == []
    gate.fire()
    inner.drain()
    assert f.landed() == [transfer.entry]


def overwritten(seed: int, *, fenced: bool, **defect: object) -> list[int]:
    """Two transfers write the same pages in crossed order, so each page is written by both streams; what is left.

    The marks of the first come early: the second is queued while the first has not executed.
    """
    f = fixture(seed, early_marks_of=COPY_STREAMS, **defect)
    first = f.add([1] * 4, [0, 1, 2, 3])
    f.queue.issue(None)
    assert f.landed() == [first.entry]
    assert first.copied_by is not None
    f.add([2] * 4, [2, 3, 0, 1], first.copied_by if fenced else OPEN, scrub=[0, 1, 2, 3])
    f.queue.issue(None)
    f.device.drain()
    return [f.page(page) for page in range(4)]


def test_copies_of_different_transfers_into_one_page_are_ordered_by_its_fence() -> None:
    assert all(overwritten(seed, fenced=True) == [2] * 4 for seed in SEEDS)
    assert any(overwritten(seed, fenced=False) != [2] * 4 for seed in SEEDS), "else this shows nothing"


@pytest.mark.parametrize("dropped", COPY_STREAMS)
def test_a_copy_stream_that_does_not_wait_for_the_last_writers_is_noticed(dropped: str) -> None:
    assert any(overwritten(seed, fenced=True, drop_waits_of={dropped}) != [2] * 4 for seed in SEEDS)


def test_transfers_may_come_from_different_slabs() -> None:
    f = fixture()
    other = f.device.adopt_host(bytes([200]) * (4 * PAGE))
    one = f.add([5, 6], [0, 1])
    two = f.add([0, 3], [2, 3])
    two.slab = other
    f.queue.issue(None)
    f.device.drain()
    assert set(f.landed()) == {one.entry, two.entry}
    assert [f.page(page) for page in range(4)] == [5, 6, 200, 200]


def test_host_bytes_are_those_that_are_there_when_the_copy_executes() -> None:
    f = fixture()
    f.add([5], [0])
    f.queue.issue(None)
    f.slab[5 * PAGE : 6 * PAGE] = 77
    f.device.drain()
    assert f.page(0) == 77


def test_how_long_a_transfer_took_is_told_from_its_first_piece_on() -> None:
    f = fixture()
    transfer = f.add(range(4), range(4))
    f.clock.now = 110.0
    f.queue.issue(2)
    f.clock.now = 112.0
    f.queue.issue(2)
    f.device.drain()
    f.clock.now = 115.5
    (landed,) = f.queue.landed()
    assert (landed.entry, landed.nbytes, landed.seconds) == (transfer.entry, 4 * PAGE, 5.5)


def test_pages_a_step_are_bounded_over_transfers() -> None:
    f = fixture()
    f.add(range(3), range(3)), f.add(range(3, 6), range(3, 6))
    for expected in (4, 6):
        f.queue.issue(4)
        assert f.device.inner.copied_bytes == expected * PAGE


class _Refusing(DefectiveDevice):
    """Refuses a call of one kind in one stream."""

    def __init__(self, inner: SimulatedDevice, call: str, stream: str) -> None:
        super().__init__(inner)
        self._call, self._stream = call, stream
        self.copy_runs = self._copy_runs  # type: ignore[method-assign]
        self.zero = self._zero  # type: ignore[method-assign]

    def _check(self, call: str, stream: Stream) -> None:
        if (call, stream.name) == (self._call, self._stream):  # type: ignore[attr-defined]
            self._call = ""
            raise error(Code.DEVICE_ERROR, "simulated", f"no {call}")

    def _copy_runs(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int
    ) -> None:
        self._check("copy_runs", stream)
        self.inner.copy_runs(stream, dst, src, runs, page_bytes)

    def _zero(self, stream: Stream, dst: torch.Tensor) -> None:
        self._check("zero", stream)
        self.inner.zero(stream, dst)

    def record(self, stream: Stream) -> Event:
        self._check("record", stream)
        return super().record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._check("wait", stream)
        super().wait(stream, event)


@pytest.mark.parametrize("stream", COPY_STREAMS)
@pytest.mark.parametrize("call", ["wait", "zero", "copy_runs", "record"])
def test_a_transfer_that_either_stream_refuses_is_lost_and_the_next_goes_on(call: str, stream: str) -> None:
    f = Fixture(_Refusing(SimulatedDevice(), call, stream))
    fence = Fence((f.device.record(f.device.compute),))
    bad = f.add(range(4), [0, 1, 8, 9], fence, scrub=[0, 1, 8, 9])
    good = f.add(range(4, 8), range(4, 8))
    f.queue.issue(None)
    f.device.drain()
    (lost,) = f.queue.lost()
    assert lost.entry is bad.entry
    assert lost.problems[0].code is Code.DEVICE_ERROR
    assert bad.copied_by is None
    assert bad.entry.copied_by == OPEN
    assert f.landed() == [good.entry]
    assert not f.queue.busy
    assert [f.page(page) for page in range(4, 8)] == [4, 5, 6, 7]


def test_a_transfer_whose_mark_turns_out_broken_is_lost() -> None:
    class Broken(DefectiveDevice):
        def record(self, stream: Stream) -> Event:
            class Mark:
                def done(self) -> bool:
                    raise error(Code.DEVICE_ERROR, "simulated", "broken")

            return Mark()

    f = Fixture(Broken(SimulatedDevice()))
    transfer = f.add(range(2), range(2))
    f.queue.issue(None)
    assert f.queue.busy
    assert f.landed() == []
    assert [lost.entry for lost in f.queue.lost()] == [transfer.entry]
    assert f.queue.lost() == []
    assert not f.queue.busy


def test_issuing_does_nothing_that_blocks_and_makes_no_mark_that_stays() -> None:
    """I13, C7: whatever is enqueued, the serving thread goes on; marks are as many as are referred to."""
    f = fixture()
    for turn in range(30):
        with f.device.serving():
            f.add(range(4), range(4))
            f.queue.issue(None)
        f.device.drain()
        with f.device.serving():
            assert len(f.queue.landed()) == 1
        assert f.device.events_alive <= 2, turn
    assert f.page(0) != POISON


def test_how_soon_one_can_land_is_known_from_the_quickest() -> None:
    f = fixture()
    taken = []
    for seconds in (8.0, 4.0, 6.0):
        f.add(range(4), range(4))
        f.queue.issue(None)
        taken.append(f.queue.soonest())
        f.clock.now += seconds
        f.device.drain()
        assert len(f.queue.landed()) == 1
    assert taken == [0.0, 8.0, 4.0]
    f.add(range(2), range(2))
    f.queue.issue(None)
    f.clock.now += 1.5
    assert f.queue.soonest() == 0.5
    f.add(range(4), range(4, 8))
    assert f.queue.soonest() == 0.0, "one is not issued yet"
    f.queue.issue(None)
    assert f.queue.soonest() == 0.5
    f.clock.now += 1.5
    assert f.queue.soonest() == 0.0


def test_what_was_stopped_is_no_measure_of_how_soon_one_can_land() -> None:
    f = fixture()
    transfer = f.add(range(4), range(4))
    f.queue.issue(1)
    f.queue.stop(transfer.entry)
    f.queue.issue(None)
    f.clock.now += 1.0
    f.device.drain()
    assert f.landed() == [transfer.entry]
    f.add(range(4), range(4))
    f.queue.issue(None)
    assert f.queue.soonest() == 0.0


def test_a_queue_is_opened_first() -> None:
    device: Device = SimulatedDevice()
    queue = CopyQueue(device, device.allocate_arena(PAGE), PAGE, Condition())
    entry = Entry(VersionKey("acme", BASE, "0" * 64))
    queue.add(Transfer(entry, device.allocate_host(PAGE), (0,), Allotment((0,), OPEN, ())))
    with pytest.raises(AssertionError, match="not open"):
        queue.issue(None)
