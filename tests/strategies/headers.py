"""Safetensors headers that know the grammar: sound ones, ones with a slip or two, hostile ones."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import strategies as st

from adapterd.loader.formats.safetensors_header import DTYPE_BITS
from strategies.spelling import LEADERS, NO_INTEGERS, NO_STRINGS, TRAILERS, Literal, Table, spelled

WHOLE_BYTE_DTYPES = tuple(sorted(d for d, bits in DTYPE_BITS.items() if bits % 8 == 0))
PATHS = ("q", "model.layers.0.self_attn.q_proj", "h.1.attn.c_attn", "a-b_c.7")
BAD_NAMES = (
    "",
    ".",
    "a..b",
    "a.",
    ".a",
    "a b",
    "a\n",
    "a\0",
    "../x",
    "a/b",
    "a\\b",
    "\uff51",
    "__metadata__",
    "x" * 513,
)
METADATA = "__metadata__"


@dataclass(frozen=True)
class HeaderFile:
    """The parts of a file; `length` is what the prefix says where it lies."""

    text: bytes
    data_bytes: int
    length: int | None = None

    @property
    def start(self) -> bytes:
        """Prefix and header."""
        length = len(self.text) if self.length is None else self.length
        return struct.pack("<Q", length & (2**64 - 1)) + self.text

    @property
    def data(self) -> bytes:
        """Bytes that tell their place, so that a wrong offset shows."""
        return (bytes(range(251)) * (self.data_bytes // 251 + 1))[: self.data_bytes]

    @property
    def file(self) -> bytes:
        return self.start + self.data


@dataclass
class Draft:
    """A header on its way to a file, for slips to change."""

    entries: list[tuple[str, Any]]
    data_bytes: int
    length_off: int = 0
    leader: bytes = b""
    trailer: bytes = b""

    def written(self, random: Random, *, plain: bool = False) -> HeaderFile:
        text = self.leader + spelled(Table.of(self.entries), random, plain=plain) + self.trailer
        return HeaderFile(text, max(self.data_bytes, 0), len(text) + self.length_off if self.length_off else None)


def _draft(random: Random, tensors: int) -> Draft:
    entries: list[tuple[str, Any]] = []
    at = 0
    for index in range(tensors):
        dtype = random.choice(WHOLE_BYTE_DTYPES)
        shape = [random.choice((1, 2, 3, 8)) for _ in range(random.choice((0, 1, 2, 2, 2, 3, 4)))]
        size = DTYPE_BITS[dtype] // 8
        for dim in shape:
            size *= dim
        name = f"base_model.model.{random.choice(PATHS)}{index}.lora_{random.choice('AB')}.weight"
        entries.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}))
        at += size
    random.shuffle(entries)
    if random.random() < 0.5:
        entries.insert(random.randrange(len(entries) + 1), (METADATA, {"format": "pt", "é\0": "\u2028"}))
    return Draft(entries, at)


def _tensor(draft: Draft, random: Random) -> tuple[int, str, dict[str, Any]] | None:
    places = [i for i, (name, info) in enumerate(draft.entries) if name != METADATA and isinstance(info, dict)]
    if not places:
        return None
    place = random.choice(places)
    name, info = draft.entries[place]
    return place, name, dict(info)


def _field_slip(draft: Draft, random: Random) -> None:
    found = _tensor(draft, random)
    if found is None:
        return
    place, name, info = found
    field = random.choice(("dtype", "shape", "data_offsets"))
    match random.randrange(5):
        case 0:
            info.pop(field, None)
        case 1:
            info[random.choice(("extra", "Dtype", "shape ", ""))] = random.choice((None, 1, "x", [0]))
        case 2:
            info["dtype"] = random.choice((*DTYPE_BITS, "f32", "F12", "F4", *NO_STRINGS))
        case 3:
            info[field] = random.choice((*NO_INTEGERS, *NO_STRINGS))
        case 4:
            again = Table.of([*info.items(), *random.sample(list(info.items()), min(len(info), 1))])
            others = ([*info.values()], None, Literal(b"{}"), 7, again)
            draft.entries[place] = (name, random.choice(others))
            return
    draft.entries[place] = (name, info)


def _number_slip(draft: Draft, random: Random) -> None:
    found = _tensor(draft, random)
    if found is None:
        return
    place, name, info = found
    field = random.choice(("shape", "data_offsets"))
    numbers = list(info.get(field) or ()) if isinstance(info.get(field), list) else [0]
    index = random.randrange(len(numbers) + 1)
    change = random.choice((*NO_INTEGERS, 0, 1, -1, 2**31, 2**32, 2**53, 2**63, 2**64 - 1, 2**64))
    match random.randrange(4):
        case 0:
            numbers.insert(index, change)
        case 1 if numbers:
            del numbers[index % len(numbers)]
        case 2 if numbers and isinstance(numbers[index % len(numbers)], int):
            numbers[index % len(numbers)] += random.choice((-2, -1, 1, 2, 8))
        case _:
            numbers[index : index + 1] = [change]
    info[field] = numbers
    draft.entries[place] = (name, info)


def _name_slip(draft: Draft, random: Random) -> None:
    if draft.entries:
        place = random.randrange(len(draft.entries))
        names = (*BAD_NAMES, draft.entries[random.randrange(len(draft.entries))][0])
        draft.entries[place] = (random.choice(names), draft.entries[place][1])


def _metadata_slip(draft: Draft, random: Random) -> None:
    values = (None, {}, [], "x", {"a": None}, {"a": 1}, {"a": {"b": "c"}}, {"": ""}, {"a": "x" * 70_000})
    pairs = Table.of([("a", "1"), ("a", "2")])
    draft.entries.append((METADATA, random.choice((*values, pairs, Literal(b'{"a":"\\ud800"}')))))


def _frame_slip(draft: Draft, random: Random) -> None:
    match random.randrange(4):
        case 0:
            draft.data_bytes += random.choice((-8, -1, 1, 8, 4096))
        case 1:
            draft.length_off = random.choice((-9, -1, 1, 8, 2**24, 2**32, 2**63))
        case 2:
            draft.leader = random.choice(LEADERS)
        case 3:
            draft.trailer = random.choice(TRAILERS) * random.choice((1, 1, 7))


def _repeat_slip(draft: Draft, random: Random) -> None:
    if draft.entries:
        draft.entries.append(random.choice(draft.entries))


SLIPS: tuple[Callable[[Draft, Random], None], ...] = (
    _field_slip, _number_slip, _number_slip, _name_slip, _metadata_slip, _frame_slip, _repeat_slip,
)  # fmt: skip


def _randoms() -> st.SearchStrategy[Random]:
    return st.integers(0, 2**32 - 1).map(Random)


@st.composite
def sound_headers(draw: st.DrawFn) -> HeaderFile:
    """Accepted by every reader."""
    random = draw(_randoms())
    return _draft(random, draw(st.integers(0, 5))).written(random, plain=draw(st.booleans()))


@st.composite
def near_headers(draw: st.DrawFn) -> HeaderFile:
    """A sound header with one to three slips; some of them do no harm."""
    random = draw(_randoms())
    draft = _draft(random, draw(st.integers(0, 5)))
    for slip in draw(st.lists(st.sampled_from(SLIPS), min_size=1, max_size=3)):
        slip(draft, random)
    return draft.written(random)


def _many(count: int, item: bytes) -> bytes:
    return b"{" + b",".join(b'"t%d":' % i + item for i in range(count)) + b"}"


HOSTILE: tuple[Callable[[int], bytes], ...] = (
    lambda n: b'{"a":' + b"[" * n + b"]" * n + b"}",
    lambda n: b'{"a":' * n + b"1" + b"}" * n,
    lambda n: b'{"a":{"dtype":"F32","shape":[' + b"1," * n + b'1],"data_offsets":[0,4]}}',
    lambda n: b'{"a":{"dtype":"F32","shape":[' + b"9" * n + b'],"data_offsets":[0,4]}}',
    lambda n: b'{"' + b"x" * n + b'":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    lambda n: b'{"' + b"\\u0061" * n + b'":{}}',
    lambda n: _many(n, b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'),
    lambda n: _many(n, b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'),
    lambda n: b'{"__metadata__":' + _many(n, b'""') + b"}",
    lambda n: b'{"' + b"\\" * n + b'":1}',
    lambda n: b'{"a":"' + b'\\"' * n,
    lambda n: b"{" + b'"",' * n,
    lambda n: b'{"a":1e' + b"9" * n + b"}",
    lambda n: b"{" + b"\xf0\x9f\x98\x80" * n + b"}",
)


@st.composite
def hostile_headers(draw: st.DrawFn) -> HeaderFile:
    """One thing, too often."""
    text = draw(st.sampled_from(HOSTILE))(draw(st.sampled_from((0, 1, 7, 9, 64, 65, 600, 5000))))
    return HeaderFile(text, draw(st.sampled_from((0, 1, 4, 64))))


def header_files() -> st.SearchStrategy[HeaderFile]:
    """Any of them; mostly nearly valid, where readers differ."""
    return st.one_of(sound_headers(), near_headers(), near_headers(), near_headers(), hostile_headers())
