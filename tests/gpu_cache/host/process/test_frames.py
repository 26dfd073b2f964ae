"""Frames: any cut of a stream gives the same messages, and nothing else is taken."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.gpu_cache.host.process.frames import MAX_FRAME_BYTES, MAX_HEAD_BYTES, Frame, FrameReader, Garbled

FRAMES = st.lists(st.builds(Frame, st.binary(max_size=200), st.binary(max_size=200)), max_size=8)


@given(FRAMES, st.randoms(use_true_random=False))
def test_a_stream_gives_the_same_frames_however_it_is_cut(frames: list[Frame], chosen: object) -> None:
    stream = b"".join(frame.encoded() for frame in frames)
    reader, found = FrameReader(), []
    while stream:
        size = chosen.randint(1, 40)  # type: ignore[attr-defined]
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert found == frames
    assert not reader.unfinished


@given(st.binary(max_size=400))
def test_garbage_is_refused_or_waited_for_and_never_held_beyond_what_came(data: bytes) -> None:
    reader = FrameReader()
    try:
        taken = sum(8 + len(frame.head) + len(frame.body) for frame in reader.feed(data))
    except Garbled:
        return
    assert taken <= len(data)


@pytest.mark.parametrize("size", [0, 3, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_size_is_judged_before_anything_is_waited_for(size: int) -> None:
    with pytest.raises(Garbled):
        list(FrameReader().feed(struct.pack(">I", size)))


@pytest.mark.parametrize("head", [5, MAX_HEAD_BYTES + 1, 0xFFFFFFFF])
def test_a_head_lies_inside_its_frame(head: int) -> None:
    with pytest.raises(Garbled):
        list(FrameReader().feed(struct.pack(">II", 8, head) + b"head"))


def test_what_would_be_refused_is_not_sent() -> None:
    with pytest.raises(Garbled):
        Frame(b"", bytes(MAX_FRAME_BYTES)).encoded()
    with pytest.raises(Garbled):
        Frame(bytes(MAX_HEAD_BYTES + 1)).encoded()


def test_half_a_frame_is_told_from_an_end() -> None:
    reader = FrameReader()
    assert list(reader.feed(Frame(b"[]").encoded()[:-1])) == []
    assert reader.unfinished
