"""JSON that two parsers could read as two things is no JSON here."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterd.loader.errors import Code, Refused
from adapterd.loader.formats.json_strict import JsonRules, parse_object

RULES = JsonRules(
    where="file.json",
    max_bytes=4096,
    max_depth=6,
    max_values=300,
    invalid=Code.CONFIG_NOT_JSON,
    duplicate=Code.CONFIG_DUPLICATE_KEY,
    too_deep=Code.CONFIG_TOO_DEEP,
    too_large=Code.CONFIG_TOO_LARGE,
    too_many=Code.QUOTA_EXCEEDED,
    bad_number=Code.CONFIG_BAD_VALUE,
)


def refusal(data: bytes) -> Code:
    with pytest.raises(Refused) as caught:
        parse_object(data, RULES)
    return caught.value.code


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[1]",
        b"3",
        b"null",
        b"{",
        b'{"a":1,}',
        b'{"a":1}{}',
        b'{"a":1}\0',
        b'{"a":"\n"}',
        b"{'a':1}",
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":"\xff"}',
        '{"a":1}'.encode("utf-16"),
        b'{"a":"\\ud800"}',
        b'{"\\udc00x":1}',
        b'{"a":[{"b":"\\ud83d\\u0020"}]}',
        b'{"a":"',
        b'{"a":"\\',
    ],
)
def test_what_is_not_one_utf8_json_object_is_refused(data: bytes) -> None:
    assert refusal(data) is Code.CONFIG_NOT_JSON


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":1}',
        b'{"a":{"b":1,"c":2,"b":3}}',
        b'{"a":[{"b":1,"\\u0062":2}]}',
    ],
)
def test_a_key_stands_once_at_any_level(data: bytes) -> None:
    assert refusal(data) is Code.CONFIG_DUPLICATE_KEY


def test_a_duplicate_is_named() -> None:
    with pytest.raises(Refused) as caught:
        parse_object(b'{"x":{"lora\\nalpha":1,"lora\\nalpha":2}}', RULES)
    assert caught.value.problem.where == "lora\\nalpha"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e400", "9" * 65])
def test_a_number_is_finite_and_of_bounded_length(number: str) -> None:
    assert refusal(b'{"a":' + number.encode() + b"}") is Code.CONFIG_BAD_VALUE


@pytest.mark.parametrize("number", ["9" * 1025, "-" + "9" * 2000, "0." + "9" * 2000, "1e" + "0" * 2000])
def test_an_endless_number_is_refused_before_it_is_read(number: str) -> None:
    assert refusal(b'{"a":' + number.encode() + b"}") is Code.CONFIG_BAD_VALUE


def test_minus_zero_is_a_fraction_as_for_other_readers() -> None:
    read = parse_object(b'{"a":-0,"b":[-0, 0, -0.0, -0e1],"c":"-0","-0":1}', RULES)
    assert [type(n) for n in (read["a"], *read["b"])] == [float, float, int, float, float]
    assert (read["c"], read["-0"]) == ("-0", 1)


def test_colons_and_digits_in_strings_do_not_count() -> None:
    read = {"a:b": {"c": ":::", '"\\:': "9" * 70, "d": {}}, "e": [{"f:": 1}, {}]}
    assert parse_object(json.dumps(read).encode(), RULES) == read


def test_depth_is_counted_outside_strings_only() -> None:
    deep = b'{"a":' * 5 + b'"[[[[{{{{\\"]"' + b"}" * 5
    assert parse_object(deep, RULES)
    assert refusal(b'{"a":' * 6 + b"[]" + b"}" * 6) is Code.CONFIG_TOO_DEEP
    assert refusal(b'{"a":' + b"[" * 200) is Code.CONFIG_TOO_DEEP


def test_sizes_and_counts_are_capped() -> None:
    assert refusal(b'{"a":"' + b"x" * 4096 + b'"}') is Code.CONFIG_TOO_LARGE
    assert refusal(b'{"a":[' + b"0," * 400 + b"0]}") is Code.QUOTA_EXCEEDED
    assert refusal(b'{"a":[' + b"[]," * 200 + b"[]]}") is Code.QUOTA_EXCEEDED
    assert refusal(b'{"a":[' + b'""' * 900 + b"]}") is Code.QUOTA_EXCEEDED


plain = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(codec="utf-8"), max_size=8)
values = st.recursive(
    plain | text, lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3), max_leaves=8
)
WIDE = dataclasses.replace(RULES, max_bytes=1 << 20, max_depth=40, max_values=10_000)


@settings(deadline=None)  # the machine may be busy
@given(st.dictionaries(text, values, max_size=5), st.booleans())
def test_every_honest_object_is_read_as_python_reads_it(value: dict[str, object], ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert parse_object(data, WIDE) == value


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_a_refusal(data: bytes) -> None:
    for text in (data, b"{" + data, b'{"a":' + data + b"}"):
        try:
            assert isinstance(parse_object(text, RULES), dict)
        except Refused as refusal:
            assert refusal.problem.message.isascii()
