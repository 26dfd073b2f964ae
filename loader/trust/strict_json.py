"""Foreign JSON, read strictly: UTF-8, no duplicate keys, no NaN, bounded depth, exact fields and types.

Everything here raises `Malformed`, which each caller turns into the problem code of its own document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.formats.json_strict import JsonRules, parse_object

MAX_DEPTH = 16
MAX_VALUES = 1 << 20
HEX_64 = re.compile(r"[0-9a-f]{64}")
# One code for all: `parse` turns each of them into Malformed.
_RULES = JsonRules(
    where="",
    max_bytes=32 << 20,
    max_depth=MAX_DEPTH,
    max_values=MAX_VALUES,
    invalid=Code.REQUEST_INVALID,
    duplicate=Code.REQUEST_INVALID,
    too_deep=Code.REQUEST_INVALID,
    too_large=Code.REQUEST_INVALID,
    too_many=Code.REQUEST_INVALID,
    bad_number=Code.REQUEST_INVALID,
)


class Malformed(Exception):
    """The document is not what it must be. Never leaves the loader: its callers translate it.

    Attributes:
        where: the field, as a path like `predicate.files[3].sha256`.
        message: one sentence.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where
        self.message = message


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, whose size the caller has checked. Raises Malformed."""
    try:
        return parse_object(data, _RULES)
    except AdapterdError as e:
        raise Malformed("", e.problem.message) from e


class Fields:
    """An object of which exactly the named fields may be there; each getter checks one type."""

    def __init__(self, value: object, where: str, *, need: Set[str], may: Set[str] = frozenset()) -> None:
        if not isinstance(value, dict):
            raise Malformed(where, "must be an object")
        self._values: Mapping[str, Any] = value
        self._where = where
        missing = sorted(need - value.keys())
        if missing:
            raise Malformed(self.at(missing[0]), "this field is missing")
        unknown = sorted(value.keys() - need - may)
        if unknown:
            raise Malformed(self.at(unknown[0][:80]), "this field is not known")

    def at(self, name: str) -> str:
        """Where the field stands, for a message."""
        return f"{self._where}.{name}" if self._where else name

    def raw(self, name: str) -> Any:
        """The field's value, or None if it is not there."""
        return self._values.get(name)

    def text(self, name: str, pattern: re.Pattern[str] | None = None, *, longest: int = 1024) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or len(value) > longest:
            raise Malformed(self.at(name), f"must be a string of at most {longest} characters")
        if pattern is not None and not pattern.fullmatch(value):
            raise Malformed(self.at(name), f"{value[:80]!r} does not have the form that it must have")
        return value

    def exactly(self, name: str, wanted: str) -> None:
        value = self._values.get(name)
        if value != wanted:
            raise Malformed(self.at(name), f"must be {wanted!r}")

    def hex64(self, name: str) -> str:
        return self.text(name, HEX_64, longest=64)

    def hex64_or_null(self, name: str) -> str | None:
        return None if self._values.get(name) is None else self.hex64(name)

    def integer(self, name: str, *, least: int = 0, most: int = 1 << 53) -> int:
        value = self._values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise Malformed(self.at(name), f"must be an integer from {least} to {most}")
        return value

    def boolean(self, name: str) -> bool:
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise Malformed(self.at(name), "must be true or false")
        return value

    def items(self, name: str, *, most: int) -> list[Any]:
        value = self._values.get(name)
        if not isinstance(value, list) or len(value) > most:
            raise Malformed(self.at(name), f"must be a list of at most {most} entries")
        return value

    def mapping(self, name: str, *, most: int) -> dict[str, Any]:
        value = self._values.get(name)
        if not isinstance(value, dict) or len(value) > most:
            raise Malformed(self.at(name), f"must be an object of at most {most} fields")
        return value
