"""Reading what describes a base: files with caps, JSON objects with exactly the wanted fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.formats.json_strict import JsonRules, parse_object
from adapterd.loader.formats.text import shown
from adapterd.loader.regular_file import NotRegular, open_regular

MAX_JSON_DEPTH = 64
MAX_JSON_VALUES = 1 << 22
MAX_PATH_LENGTH = 512
"""As long as a tensor's name may be (`Limits.max_name_bytes`)."""


def invalid(where: str, message: str, hint: str = "") -> AdapterdError:
    """The error of these rooms: Failed (BASE_TABLE_INVALID)."""
    return error(Code.BASE_TABLE_INVALID, where, message, hint)


def fields(
    value: object, where: str, wanted: Mapping[str, type], optional: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """`value` as an object with all of `wanted`, maybe some of `optional`, each of its type, and nothing else.

    Raises:
        Failed: BASE_TABLE_INVALID at the field at fault.
    """
    known = {**wanted, **(optional or {})}
    if not isinstance(value, dict):
        raise invalid(where, f"must be an object, not {type(value).__name__}")
    for name in sorted(map(str, value.keys() - known.keys())):
        raise invalid(f"{where}.{shown(name, 40)}", "unknown field")
    for name, kind in known.items():
        if name not in value and name in wanted:
            raise invalid(f"{where}.{name}", "is missing")
        if name in value and type(value[name]) is not kind:  # bool is an int to isinstance
            raise invalid(f"{where}.{name}", f"must be {kind.__name__}, not {type(value[name]).__name__}")
    return value


def is_module_path(value: object) -> bool:
    """Whether `value` may be a module's full name."""
    return isinstance(value, str) and 0 < len(value) <= MAX_PATH_LENGTH and value.isprintable()


def read_file(path: Path, limit: int) -> bytes:
    """At most `limit` bytes of a regular file. Raises NotFound (PATH_NOT_FOUND), or Failed (BASE_TABLE_INVALID)."""
    try:
        with open_regular(path) as file:
            return read_open(file, path.name, limit)
    except NotRegular as e:
        raise invalid(path.name, "is no regular file") from e
    except OSError as e:
        raise error(Code.PATH_NOT_FOUND, str(path), f"cannot be read: {e.strerror or e}") from e


def read_open(file: IO[bytes], name: str, limit: int) -> bytes:
    """At most `limit` bytes. Raises OSError, Failed (BASE_TABLE_INVALID) for more."""
    data = file.read(limit + 1)
    if len(data) > limit:
        raise invalid(name, f"is larger than {limit} bytes")
    return data


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object, each name once. Raises Failed (BASE_TABLE_INVALID)."""
    code = Code.BASE_TABLE_INVALID
    rules = JsonRules(
        where, max_bytes=len(data), max_depth=MAX_JSON_DEPTH, max_values=MAX_JSON_VALUES,
        invalid=code, duplicate=code, too_deep=code, too_large=code, too_many=code, bad_number=code,
    )  # fmt: skip
    return parse_object(data, rules)
