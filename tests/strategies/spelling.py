"""JSON as any writer may spell it: white space, escapes, duplicate keys, literals that are no JSON.

What a strategy decides it draws; how the same value is spelled comes from a `random.Random` that is drawn
once, because thousands of draws a file would make fuzzing slow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class Literal:
    """Text that stands for a value as it is, JSON or not."""

    text: bytes


@dataclass(frozen=True)
class Table:
    """An object by its pairs, so that a key may come twice."""

    pairs: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, pairs: Sequence[tuple[str, Any]]) -> Table:
        return cls(tuple(pairs))


NO_INTEGERS = tuple(map(Literal, (
    b"-0", b"0.0", b"1.0", b"1e0", b"4E0", b"-1", b"01", b"+1", b"0x4", b"NaN", b"Infinity", b"-Infinity", b"true",
    b"false", b"null", b'"4"', b"[4]", b"{}", b"1e400", b"18446744073709551615", b"18446744073709551616",
    b"9223372036854775808", b"4294967296", b"1" * 80, b"1_0", b".5", b"5.", b"- 1", b"\xd9\xa4",
)))  # fmt: skip
"""What may stand where an integer should."""

NO_STRINGS = tuple(map(Literal, (
    b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\\x41"', b'"\x00"', b'"\n"', b'"\xff"',
    b'"\xed\xa0\x80"', b'"\xc0\xaf"', b"'a'", b"a", b'"unclosed', b'"\\', b'"\\u12"', b'""', b"1", b"null", b"[]",
)))  # fmt: skip
"""What may stand where a string should."""

TRAILERS = (
    b"",
    b" ",
    b"   ",
    b"\n",
    b"\t \r\n",
    b"\0",
    b"\0\0",
    b"\x0b",
    b",",
    b"}",
    b"{}",
    b"\xef\xbb\xbf",
    b"//",
    b"#",
)
LEADERS = (b"", b" ", b"\n", b"\xef\xbb\xbf", b"\0", b"[", b"//\n")


def spelled(value: Any, random: Random, *, plain: bool = False) -> bytes:
    """The JSON text of `value`. `plain`: as `json.dumps` writes it."""
    if isinstance(value, Literal):
        return value.text
    if isinstance(value, dict):
        return spelled(Table.of(list(value.items())), random, plain=plain)
    if isinstance(value, Table):
        return _joined(b"{}", [_pair(key, item, random, plain) for key, item in value.pairs], random, plain)
    if isinstance(value, list | tuple):
        return _joined(b"[]", [spelled(item, random, plain=plain) for item in value], random, plain)
    if isinstance(value, str):
        return _string(value, random, plain)
    return json.dumps(value).encode()


def _pair(key: str, value: Any, random: Random, plain: bool) -> bytes:
    return _string(key, random, plain) + _space(random, plain) + b":" + spelled(value, random, plain=plain)


def _joined(ends: bytes, items: list[bytes], random: Random, plain: bool) -> bytes:
    space = _space(random, plain)
    return ends[:1] + space + (b"," + space).join(items) + ends[1:]


def _space(random: Random, plain: bool) -> bytes:
    return b"" if plain or random.random() < 0.9 else random.choice((b" ", b"\n", b"\t", b"\r\n", b"  "))


def _string(text: str, random: Random, plain: bool) -> bytes:
    if plain or random.random() < 0.9:
        return json.dumps(text, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
    return b'"' + b"".join(_character(c, random) for c in text) + b'"'


def _character(character: str, random: Random) -> bytes:
    if ord(character) < 0x10000 and random.random() < 0.3:
        return b"\\u%04x" % ord(character)
    if character == "/":
        return b"\\/"
    return json.dumps(character)[1:-1].encode()
