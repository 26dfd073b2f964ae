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

# An unclosed string counts to the end of the text, so that no byte is looked at twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_SHAPE = bytes(b for b in range(256) if b not in b"[]{},")
_OPENING = frozenset(b"[{")
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
    _check_shape(data, rules)
    value = _loads(_decode(data, rules), rules)
    if not isinstance(value, dict):
        raise error(rules.invalid, rules.where, f"the JSON is a {type(value).__name__}, not an object")
    return value


def _check_shape(data: bytes, rules: JsonRules) -> None:
    """Depth and number of values, from the brackets and commas outside strings."""
    # Four unescaped quotes a value at most, a key's and a string's; counted before strings are looked for.
    quotes = data.count(b'"') - data.count(b'\\"')
    if quotes > 4 * rules.max_values:
        raise error(rules.too_many, rules.where, f"{quotes} quotes, more than any JSON that is read can hold")
    shape = _STRING.sub(b"", data).translate(None, _NOT_SHAPE)
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


def _loads(text: str, rules: JsonRules) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(items)
        if len(fields) != len(items):
            _refuse_duplicate(items, rules)
        return fields

    def integer(digits: str) -> int:
        if len(digits) > MAX_NUMBER_DIGITS:
            raise error(rules.bad_number, rules.where, f"a number of {len(digits)} digits")
        return int(digits)

    def real(digits: str) -> float:
        number = float(digits) if len(digits) <= 1024 else math.inf
        if not math.isfinite(number):
            raise error(rules.bad_number, rules.where, f"the number {shown(digits, 40)} is out of range")
        return number

    def constant(name: str) -> NoReturn:
        raise error(rules.bad_number, rules.where, f"{name} is no JSON number")

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_int=integer, parse_float=real, parse_constant=constant)
    except json.JSONDecodeError as bad:
        raise error(rules.invalid, rules.where, f"not JSON: {bad.msg} at character {bad.pos}") from None
    except RecursionError:  # bounded above; a caller who is deep in its own stack gets an answer, too
        raise error(rules.too_deep, rules.where, "JSON nested too deeply for this call") from None
    if _SURROGATE.search(text):
        _check_surrogates(value, rules)
    return value


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
