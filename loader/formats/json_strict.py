"""JSON as a hostile file must not bend it: UTF-8 only, one value, no duplicate keys, bounded depth and size.

Python's own parser keeps the last of two equal keys, takes NaN, and recurses; two readers of one
file then see two files. Everything here is decided from the bytes, before a value is built.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.text import shown

# A longer integer is in no field of either format; int() is quadratic in the digits.
MAX_NUMBER_DIGITS = 64
# Nor so long a fraction, which would be copied a few times before it is read.
MAX_FRACTION_DIGITS = 1024

# An unclosed string counts to the end of the text, so that no byte is looked at twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_SHAPE = bytes(b for b in range(256) if b not in b"[]{},")
_OPENING = frozenset(b"[{")
# Integers that Python's parser would take, or take otherwise than others do.
_ODD_INTEGER = re.compile(rb"\d{%d}|-0(?![.eE])" % MAX_NUMBER_DIGITS)
_ENDLESS_NUMBER = re.compile(rb"\d{%d}" % (MAX_FRACTION_DIGITS + 1))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class JsonRules:
    """What one kind of file allows, and the code each broken rule gets.

    Attributes:
        where: the file, for problems that have no better place.
        max_bytes: of the whole text.
        max_depth: arrays and objects inside each other.
        max_values: arrays, objects and what stands in them, altogether; bounds the memory a text may ask for.
    """

    where: str
    max_bytes: int
    max_depth: int
    max_values: int
    invalid: Code
    duplicate: Code
    too_deep: Code
    too_large: Code
    too_many: Code
    bad_number: Code


def parse_object(data: bytes, rules: JsonRules) -> dict[str, Any]:
    """The JSON object that `data` is.

    Raises:
        Refused: with the code of `rules` for the rule that is broken.
    """
    if len(data) > rules.max_bytes:
        raise error(rules.too_large, rules.where, f"{len(data)} bytes of JSON, at most {rules.max_bytes} are read")
    form = _form(data, rules)
    value = _loads(_decode(data, rules), form, rules)
    if not isinstance(value, dict):
        raise error(rules.invalid, rules.where, f"the JSON is a {type(value).__name__}, not an object")
    return value


@dataclass(frozen=True, slots=True)
class _Form:
    """What the text outside its strings tells before it is parsed.

    Attributes:
        members: of all objects together, if it is JSON: each is written with one colon.
        odd: an integer is there that is read in two ways, or is very long.
    """

    members: int
    odd: bool


def _form(data: bytes, rules: JsonRules) -> _Form:
    """Raises Refused for too many values, too deep a nesting or an endless number."""
    # Four unescaped quotes a value at most, a key's and a string's; counted before strings are looked for.
    quotes = data.count(b'"') - data.count(b'\\"')
    if quotes > 4 * rules.max_values:
        raise error(rules.too_many, rules.where, f"{quotes} quotes, more than any JSON that is read can hold")
    bare = _STRING.sub(b"", data)
    _check_shape(bare.translate(None, _NOT_SHAPE), rules)
    if _ENDLESS_NUMBER.search(bare):
        raise error(rules.bad_number, rules.where, f"a number of more than {MAX_FRACTION_DIGITS} digits")
    return _Form(bare.count(b":"), _ODD_INTEGER.search(bare) is not None)


def _check_shape(shape: bytes, rules: JsonRules) -> None:
    """Depth and number of values, from the brackets and commas outside strings."""
    brackets = shape.translate(None, b",")
    # Each value is the first of its container, or follows a comma.
    values = len(shape) - len(brackets) + brackets.count(b"{") + brackets.count(b"[")
    if values > rules.max_values:
        raise error(rules.too_many, rules.where, f"{values} JSON values, at most {rules.max_values} are read")
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in _OPENING else -1
        if depth > rules.max_depth:
            raise error(rules.too_deep, rules.where, f"JSON nested deeper than {rules.max_depth} levels")


def _decode(data: bytes, rules: JsonRules) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as bad:
        raise error(rules.invalid, rules.where, f"not UTF-8: byte {bad.start} cannot be decoded") from None


def _loads(text: str, form: _Form, rules: JsonRules) -> Any:
    """Parsed by C code alone where it says nothing that is read in two ways, which is most of the time."""
    members: list[int] = []

    def counted(fields: dict[str, Any]) -> dict[str, Any]:
        members.append(len(fields))
        return fields

    try:
        if form.odd:
            value = _loads_slowly(text, rules)
        else:
            value = json.loads(text, object_hook=counted, **_number_hooks(rules))
            if sum(members) != form.members:  # a key came twice
                value = _loads_slowly(text, rules)
    except json.JSONDecodeError as bad:
        raise error(rules.invalid, rules.where, f"not JSON: {bad.msg} at character {bad.pos}") from None
    except RecursionError:  # bounded above; a caller who is deep in its own stack gets an answer, too
        raise error(rules.too_deep, rules.where, "JSON nested too deeply for this call") from None
    if _SURROGATE.search(text):
        _check_surrogates(value, rules)
    return value


def _loads_slowly(text: str, rules: JsonRules) -> Any:
    """As `json.loads`, with a look at every integer and every object."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(items)
        if len(fields) != len(items):
            _refuse_duplicate(items, rules)
        return fields

    def integer(digits: str) -> int | float:
        if len(digits) > MAX_NUMBER_DIGITS:
            raise error(rules.bad_number, rules.where, f"a number of {len(digits)} digits")
        # Python reads -0 as the integer 0; serde_json, and so the safetensors library, as a fraction.
        return -0.0 if digits == "-0" else int(digits)

    return json.loads(text, object_pairs_hook=pairs, parse_int=integer, **_number_hooks(rules))


def _number_hooks(rules: JsonRules) -> dict[str, Any]:
    def real(digits: str) -> float:
        number = float(digits)
        if not math.isfinite(number):
            raise error(rules.bad_number, rules.where, f"the number {shown(digits, 40)} is out of range")
        return number

    def constant(name: str) -> NoReturn:
        raise error(rules.bad_number, rules.where, f"{name} is no JSON number")

    return {"parse_float": real, "parse_constant": constant}


def _refuse_duplicate(items: list[tuple[str, Any]], rules: JsonRules) -> NoReturn:
    seen: set[str] = set()
    for key, _ in items:
        if key in seen:
            raise error(rules.duplicate, shown(key), f"{rules.where} holds the key {shown(key)!r} twice in one object")
        seen.add(key)
    raise AssertionError("called without a duplicate")


def _check_surrogates(value: object, rules: JsonRules) -> None:
    """`\\ud800` alone is half a character: no UTF-8 text can hold it, so nothing could print or hash it."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, str) and any("\ud800" <= c <= "\udfff" for c in item):
            raise error(rules.invalid, rules.where, f"the string {shown(item, 60)!r} holds half a surrogate pair")
