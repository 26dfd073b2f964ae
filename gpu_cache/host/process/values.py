"""Frozen values as JSON and back: positional, every type checked, nothing that is not asked for.

A dataclass is the list of its fields in order, a REF is its text, an enumeration its value, a tuple a list.
The readers are made from the annotations, once a type, so that a message cannot be read more loosely than
it is declared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from adapterd.gpu_cache.host.process.frames import Garbled
from adapterd.loader.errors import AdapterdError
from adapterd.loader.identity import Ref

MAX_INTEGER = 1 << 62

Reader = Callable[[Any], Any]


def plain(value: Any) -> Any:
    """`value` as JSON's own types."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Ref):
        return str(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if is_dataclass(value):
        return [plain(getattr(value, f.name)) for f in fields(value)]
    return value


@cache
def reader(kind: Any) -> Reader:
    """What reads a `kind` from JSON's types; it raises Garbled."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if get_origin(kind) is not None:
        return _composed(get_origin(kind), get_args(kind))
    if issubclass(kind, Enum):
        return _member(kind)
    hints = get_type_hints(kind)
    return _row(partial(_made, kind), [reader(hints[f.name]) for f in fields(kind)])


def _made(kind: type, values: list[Any]) -> Any:
    """Some kinds look at what they are given."""
    try:
        return kind(*values)
    except AdapterdError as e:
        raise Garbled(f"no {kind.__name__}: {e}") from e


def _composed(origin: Any, inner: tuple[Any, ...]) -> Reader:
    if origin is Literal:
        return _literal(inner)
    assert origin is tuple, f"no reader for {origin}"
    if inner[1:] == (Ellipsis,):
        return _items(reader(inner[0]))
    return _row(tuple, [reader(i) for i in inner])


def _row(make: Callable[[list[Any]], Any], readers: list[Reader]) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise Garbled(f"a list of {len(readers)} values is wanted")
        return make([one(item) for one, item in zip(readers, value, strict=True)])

    return read


def _items(each: Reader) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not list:
            raise Garbled("a list is wanted")
        return tuple(each(item) for item in value)

    return read


def _member(kind: type[Enum]) -> Reader:
    def read(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError as e:
            raise Garbled(f"{str(value)[:40]!r} is no {kind.__name__}") from e

    return read


def _literal(known: tuple[Any, ...]) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not str or value not in known:
            raise Garbled(f"one of {', '.join(known)} is wanted")
        return value

    return read


def _ref(value: Any) -> Ref:
    try:
        return Ref.parse(_text(value))
    except AdapterdError as e:
        raise Garbled("not a REF") from e


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Garbled("a text is wanted")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not -MAX_INTEGER < value < MAX_INTEGER:
        raise Garbled("an integer is wanted")
    return value


def _number(value: Any) -> float:
    if type(value) not in (float, int) or not math.isfinite(value):
        raise Garbled("a number is wanted")
    return float(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise Garbled("true or false is wanted")
    return value


_PLAIN: dict[Any, Reader] = {Ref: _ref, str: _text, int: _integer, float: _number, bool: _flag}
