"""One pass: all bytes hashed in order, each pair measured from them, whatever the layout and however many threads."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterd.loader.checks import one_pass, stretches
from adapterd.loader.checks.one_pass import OnePass
from adapterd.loader.checks.pairs import Pair
from adapterd.loader.checks.stretches import Stretch, cut
from adapterd.loader.effect import Effect, Measured, Source, measure
from adapterd.loader.errors import Code, Failed, Refused, error
from adapterd.loader.formats.files import DescriptorReader, FileReader
from adapterd.loader.manifest import TensorEntry
from fakes.readers import BytesReader, Meter

HEADER = 24


def pair(number: int, a: tuple[int, int], b: tuple[int, int]) -> Pair:
    """`a`, `b`: (begin, end) in the file, of tensors of rank 1."""
    entries = (
        TensorEntry("a", "F32", (1, (a[1] - a[0]) // 4), *a),
        TensorEntry("b", "F32", ((b[1] - b[0]) // 4, 1), *b),
    )
    return Pair(f"m{number}", *entries)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, tuple[Pair, ...]]:
    """A file's size, and pairs whose tensors lie in any order, with gaps between them."""
    count = draw(st.integers(0, 6))
    order = draw(st.permutations(range(2 * count)))
    places: dict[int, tuple[int, int]] = {}
    at = HEADER
    for tensor in order:
        at += draw(st.sampled_from((0, 0, 4, 40)))
        size = 4 * draw(st.integers(1, 12))
        places[tensor] = (at, at + size)
        at += size
    return at + draw(st.sampled_from((0, 8))), tuple(pair(i, places[2 * i], places[2 * i + 1]) for i in range(count))


@settings(deadline=None)
@given(layout=layouts(), threads=st.integers(1, 4), stretch=st.integers(8, 80), most=st.integers(8, 120))
def test_all_bytes_are_digested_in_order_and_all_pairs_measured(
    layout: tuple[int, tuple[Pair, ...]], threads: int, stretch: int, most: int
) -> None:
    size, pairs = layout
    data = bytes(i % 64 for i in range(size))
    digest = hashlib.sha256()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stretches, "STRETCH_BYTES", stretch)
        patch.setattr(stretches, "MOST_BYTES", most)
        work = OnePass(BytesReader(data), pairs, measured, digest.update)
        together(work, threads)
    assert digest.digest() == hashlib.sha256(data).digest()
    assert work.results() == tuple(measured(BytesReader(data), p) for p in pairs)


@given(layout=layouts(), stretch=st.integers(8, 80), most=st.integers(8, 120))
def test_stretches_cover_the_file_and_hold_whole_pairs(
    layout: tuple[int, tuple[Pair, ...]], stretch: int, most: int
) -> None:
    size, pairs = layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stretches, "STRETCH_BYTES", stretch)
        patch.setattr(stretches, "MOST_BYTES", most)
        found, apart = cut(size, pairs)
    assert [s.begin for s in found] == [0, *(s.end for s in found)][: len(found)]
    assert found[-1].end == size
    assert sorted([*apart, *(number for s in found for number in s.pairs)]) == list(range(len(pairs)))
    assert all(s.nbytes <= max(stretch, most) for s in found)
    for s in found:
        for number in s.pairs:
            inside = pairs[number]
            assert s.begin <= min(inside.a.begin, inside.b.begin)
            assert max(inside.a.end, inside.b.end) <= s.end


def test_neighbours_share_a_stretch_and_distant_factors_are_apart() -> None:
    mib = 1 << 20
    near = [pair(i, (2 * i * mib, 2 * i * mib + 8), (2 * i * mib + 8, 2 * i * mib + 16)) for i in range(2)]
    wide = pair(2, (4 * mib, 4 * mib + 8), (40 * mib, 40 * mib + 8))
    found, apart = cut(40 * mib + 8, [*near, wide])
    assert found[:3] == (Stretch(0, 16, (0,)), Stretch(16, 2 * mib, ()), Stretch(2 * mib, 2 * mib + 16, (1,)))
    assert apart == (2,)
    touching = [pair(0, (0, 8), (8, 16)), pair(1, (16, 24), (24, 32))]
    assert cut(32, touching) == ((Stretch(0, 32, (0, 1)),), ())


def test_where_the_hash_is_known_only_pairs_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "STRETCH_BYTES", 64)
    reader = Meter(bytes(1000))
    together(OnePass(reader, [pair(0, (400, 408), (408, 416))], measured, None), 2)
    assert reader.total == 16


def test_memory_is_bounded_though_nobody_takes_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "STRETCH_BYTES", 10)
    most = 10 * one_pass.MOST
    full = threading.Event()
    held, ahead = 0, []

    class Counting(BytesReader):
        def read_at(self, offset: int, length: int) -> bytes:
            nonlocal held
            held += length
            ahead.append(held)
            if held >= most:
                full.set()
            return super().read_at(offset, length)

    def slow(data: memoryview) -> None:
        nonlocal held
        assert full.wait(30)  # the others have read as far as they may
        held -= len(data)

    together(OnePass(Counting(bytes(1000)), [], measured, slow), 3)
    assert max(ahead) == most
    assert len(ahead) == 100


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failure_ends_the_work_of_all_and_is_raised_once(threads: int) -> None:
    def broken(_: Source, __: Pair) -> Measured:
        raise error(Code.ST_TRUNCATED, "here", "no")

    work = OnePass(BytesReader(bytes(600)), [pair(0, (0, 8), (8, 16))], broken, lambda _: None)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work.work()
        except Refused as failure:
            raised.append(failure)

    crew = [threading.Thread(target=run) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(30)
        assert not thread.is_alive()
    assert len(raised) == 1


def test_a_file_that_was_written_to_or_cut_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    reader = descriptor(path)
    target = bytearray(4)
    reader.read_into(3, memoryview(target))
    assert target == b"3456"
    with pytest.raises(Refused) as cut_off:
        reader.read_into(8, memoryview(target))
    assert cut_off.value.problems[0].code is Code.ST_TRUNCATED
    path.write_bytes(b"another length")
    with pytest.raises((Refused, Failed)) as changed:
        reader.read_into(0, memoryview(target))
    assert changed.value.problems[0].code is Code.FILE_CHANGED
    reader.close()


def descriptor(path: Path) -> DescriptorReader:
    return DescriptorReader(os.open(path, os.O_RDONLY), path.name)


def measured(source: Source | FileReader, one: Pair) -> Measured:
    found = measure(source, one.a, one.b, 1.0)
    assert isinstance(found, Effect)
    return found


def together(work: OnePass, threads: int) -> None:
    others = [threading.Thread(target=work.work) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    work.work()
    for thread in others:
        thread.join()
