"""Messages: what is written is read, to the type, and nothing else is."""

from __future__ import annotations

import gc
import json
import struct
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.gpu_cache.host.interface import Facts, HostUsage, Origin, Progress, Stage
from adapterd.gpu_cache.host.process import messages
from adapterd.gpu_cache.host.process.facts import (
    BLOCK_MODULES,
    facts_from_bytes,
    facts_to_bytes,
    loading_from_bytes,
    loading_to_bytes,
    usage_from_bytes,
    usage_to_bytes,
)
from adapterd.gpu_cache.host.process.frames import Frame, FrameReader, Garbled
from adapterd.gpu_cache.host.process.messages import encode, from_loader, from_worker
from adapterd.gpu_cache.host.process.page_runs import pages_of, runs_of
from adapterd.loader.errors import Code, Problem
from adapterd.loader.identity import BasePin, FileEntry, Ref, VersionKey
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry
from adapterd.loader.planning import plan_layout
from adapterd.loader.sharding import Rule, Sharding
from adapterd.loader.sources import Resolved

TEXT = st.text(max_size=12)
NUMBER = st.integers(0, 1 << 40)
DIGEST = st.text("0123456789abcdef", min_size=64, max_size=64)
NAME = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}", fullmatch=True)
PIN = st.builds(BasePin, TEXT, TEXT, DIGEST)
REF = st.builds(Ref, NAME, NAME, st.none() | NAME, st.none() | DIGEST)
RESOLVED = st.builds(Resolved, REF, NAME, NAME, DIGEST, NUMBER, PIN)
KEY = st.builds(VersionKey, NAME, PIN, DIGEST)
PROBLEM = st.builds(Problem, st.sampled_from(Code), st.sampled_from(["reject", "warn"]), TEXT, TEXT, TEXT)
SECONDS = st.tuples(TEXT, st.floats(0, 1e6))


def several(each: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(each, max_size=4).map(tuple)


PACKED = st.builds(messages.Packed, KEY, NUMBER, NUMBER, st.sampled_from(Origin), several(SECONDS))
DTYPE = st.sampled_from(["auto", "F32", "F16", "BF16"])
RULE = st.builds(Rule, NAME, st.sampled_from(["column", "row"]), st.just(2), several(st.integers(1, 99)))
RULES = st.lists(RULE, max_size=3, unique_by=lambda rule: rule.name).map(tuple)
SHARDING = st.builds(Sharding, st.integers(0, 3), st.just(4), RULES)
FROM_WORKER = st.one_of(
    st.builds(messages.Hello, NUMBER, DIGEST, DIGEST, NUMBER, DTYPE, PIN, SHARDING),
    st.builds(messages.Table, st.binary()),
    st.builds(messages.Resolve, NUMBER, NAME, several(REF)),
    st.builds(messages.Verify, NUMBER, NAME, RESOLVED),
    st.builds(messages.Fetch, NUMBER, NAME, several(RESOLVED), st.integers(-9, 9)),
    st.builds(messages.Release, NUMBER),
    st.builds(messages.Forget, KEY),
    st.builds(messages.Rebase, st.binary()),
    st.builds(messages.Trusting, DIGEST),
    st.just(messages.Ping()),
)
FROM_LOADER = st.one_of(
    st.builds(messages.Welcome, NUMBER, NUMBER, DIGEST),
    st.builds(messages.WantTable, PIN),
    st.builds(messages.Refusal, several(PROBLEM)),
    st.builds(messages.Known, NUMBER, several(NUMBER), st.binary()),
    st.builds(messages.ResolvedAll, NUMBER, several(RESOLVED)),
    st.builds(messages.Verified, NUMBER, NUMBER),
    st.builds(messages.Fetched, NUMBER, several(PACKED), st.binary()),
    st.builds(messages.Failed, NUMBER, several(PROBLEM)),
    st.builds(messages.TrustChanged, DIGEST),
    st.builds(messages.Usage, st.binary()),
    st.builds(messages.Loading, st.binary()),
    st.just(messages.Pong()),
)


def frame_of(message: Any) -> Frame:
    (frame,) = FrameReader().feed(encode(message))
    return frame


@given(FROM_WORKER)
def test_what_a_worker_says_is_understood(message: Any) -> None:
    assert from_worker(frame_of(message)) == message


@given(FROM_LOADER)
def test_what_a_loader_says_is_understood(message: Any) -> None:
    assert from_loader(frame_of(message)) == message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
WORDS = [kind.__name__ for kind in (*get_args(messages.FromWorker), *get_args(messages.FromLoader))]


@given(st.sampled_from(WORDS), st.lists(JSON, max_size=6), st.binary(max_size=3))
def test_values_of_other_types_are_refused_and_never_something_else(word: str, values: list[Any], body: bytes) -> None:
    frame = Frame(json.dumps([word, *values]).encode(), body)
    for read in (from_worker, from_loader):
        try:
            message = read(frame)
        except Garbled:
            continue
        assert read(frame_of(message)) == message


@given(FROM_WORKER, st.data())
def test_a_message_with_one_byte_changed_is_refused_or_another_message(message: Any, data: st.DataObject) -> None:
    head = bytearray(frame_of(message).head)
    place = data.draw(st.integers(0, len(head) - 1))
    head[place] = data.draw(st.integers(0, 255))
    try:
        from_worker(Frame(bytes(head), frame_of(message).body))
    except Garbled:
        return


@pytest.mark.parametrize(
    "head",
    [
        b"", b"null", b"{}", b"[]", b"[1]", b'["Nothing"]', b'["Release"]', b'["Release",true]', b'["Release",1.0]',
        b'["Release",1,2]', b'["Release",NaN]', b'["Release",' + b"9" * 5000 + b"]", b"[" * 100_000,
        b'["Welcome",1,2,"x"]', b'["__class__"]', b'["Resolve",1,"acme",["a/b","nope"]]', b"\xff",
    ],
)  # fmt: skip
def test_what_is_no_message_of_a_worker_is_refused(head: bytes) -> None:
    with pytest.raises(Garbled):
        from_worker(Frame(head))


@pytest.mark.parametrize("sharding", ["[4,4,[]]", '[0,2,[["q","diagonal",2,[]]]]', '[0,4,[["q","row",3,[]]]]', "[0,1]"])
def test_a_sharding_that_cannot_be_is_refused(sharding: str) -> None:
    head = '["Hello",1,"t","s",4096,"auto",["b","r","d"],SHARDING]'
    assert from_worker(Frame(head.replace("SHARDING", "[0,2,[]]").encode()))
    with pytest.raises(Garbled):
        from_worker(Frame(head.replace("SHARDING", sharding).encode()))


def test_only_messages_that_carry_bytes_may() -> None:
    with pytest.raises(Garbled):
        from_worker(Frame(b'["Release",1]', b"more"))


@given(st.lists(st.integers(0, 50), unique=True, min_size=1).map(tuple))
def test_runs_give_the_pages_in_their_order(pages: tuple[int, ...]) -> None:
    assert pages_of(runs_of(pages), len(pages), 51) == pages


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([], "no runs"), ([0], "no runs"), ([0, 1, 2], "no runs"), ([-1, 3], "outside"), ([0, 4, 3, 0], "outside"),
        ([0, -1, 1, 4], "outside"), ([8, 3], "outside"), ([(1 << 31) - 1, 3], "outside"), ([0, 2], "as large"),
        ([0, 4], "as large"), ([0, 2, 0, 2], "as large"),
    ],
)  # fmt: skip
def test_runs_that_are_not_the_images_are_refused(runs: list[int], why: str) -> None:
    """Of three pages, in a slab of ten."""
    with pytest.raises(Garbled, match=why):
        pages_of(struct.pack(f"<{len(runs)}i", *runs), 3, 10)


def test_an_answer_is_read_in_as_many_calls_for_hundreds_of_runs_as_for_one() -> None:
    """The reader runs beside decode."""
    key = VersionKey("acme", BasePin("b", "a" * 40, "c" * 64), "d" * 64)
    calls = []
    for step in (1, 2):
        pages = tuple(range(0, 256 * step, step))
        runs = runs_of(pages)
        packed = messages.Packed(key, 1, len(runs) // 8, Origin.HOST, ())
        frame = frame_of(messages.Fetched(1, (packed,), runs))

        def read(frame: Frame = frame, pages: tuple[int, ...] = pages) -> None:
            fetched = from_loader(frame)
            assert isinstance(fetched, messages.Fetched)
            assert pages_of(fetched.runs, 256, 512) == pages

        read()
        calls.append(calls_of(read))
    assert calls[0] == calls[1]


def calls_of(work: Callable[[], object]) -> int:
    """Python functions that are called meanwhile."""
    calls = 0

    def count(_frame: object, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    gc.disable()  # a collection calls who listens to it, Hypothesis among others
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def manifest(modules: int) -> Manifest:
    entries = [
        ModuleEntry(
            f"layers.{i}.q_proj", 19, 32.0, 2.5, "BF16", 96, 48,
            TensorEntry(f"{i}.a", "BF16", (19, 96), 8, 16), TensorEntry(f"{i}.b", "BF16", (48, 19), 16, 24),
            None if i % 2 else 1.25,
        )
        for i in range(modules)
    ]  # fmt: skip
    return Manifest(BasePin("b", "a" * 40, "c" * 64), tuple(entries), (FileEntry("x", "d" * 64, 9),), "other")


@pytest.mark.parametrize("modules", [1, 5, BLOCK_MODULES, BLOCK_MODULES + 1, 3 * BLOCK_MODULES])
def test_facts_come_back_equal(modules: int) -> None:
    facts = Facts(manifest(modules), plan_layout(manifest(modules), "BF16"))
    assert facts_from_bytes(facts_to_bytes(facts)) == facts


def test_others_may_run_after_each_few_modules() -> None:
    """However many there are, decode waits for one block of them."""
    facts = Facts(manifest(10 * BLOCK_MODULES), plan_layout(manifest(10 * BLOCK_MODULES), "BF16"))
    between, made = [0], ModuleEntry.__init__.__code__

    def count(frame: FrameType, event: str, _: object) -> None:
        between[-1] += event == "call" and frame.f_code is made

    data = facts_to_bytes(facts)
    sys.setprofile(count)
    try:
        found = facts_from_bytes(data, lambda: between.append(0))
    finally:
        sys.setprofile(None)
    assert found == facts
    assert between == [BLOCK_MODULES] * 10 + [0]


@given(st.binary(max_size=60), st.integers(0, 400))
def test_facts_that_nobody_wrote_are_refused(data: bytes, cut: int) -> None:
    whole = facts_to_bytes(Facts(manifest(1), plan_layout(manifest(1), "F32")))
    for attempt in (data, whole[: min(cut, len(whole) - 1)], whole + data + b"!"):
        with pytest.raises(Garbled):
            facts_from_bytes(attempt)


@given(st.builds(HostUsage, st.dictionaries(NAME, NUMBER), NUMBER, st.dictionaries(KEY, NUMBER, max_size=5)))
def test_the_usage_comes_back_equal(usage: HostUsage) -> None:
    assert usage_from_bytes(usage_to_bytes(usage)) == usage


@pytest.mark.parametrize("data", [b"", b"[]", b"[1,2,3,[[1]]]", b"[{},1,[],[[1,5,2,3]]]", b"[" * 100_000])
def test_a_usage_that_nobody_wrote_is_refused(data: bytes) -> None:
    with pytest.raises(Garbled):
        usage_from_bytes(data)


@given(st.dictionaries(KEY, st.builds(Progress, st.sampled_from(Stage), NUMBER, NUMBER), max_size=5))
def test_the_progress_of_loads_comes_back_equal(loading: dict[VersionKey, Progress]) -> None:
    assert loading_from_bytes(loading_to_bytes(loading)) == loading


@pytest.mark.parametrize("data", [b"", b"{}x", b"[1]", b'[["a",["b","c","d"],"e","sing",1,2]]', b"[" * 100_000])
def test_progress_that_nobody_wrote_is_refused(data: bytes) -> None:
    with pytest.raises(Garbled):
        loading_from_bytes(data)
