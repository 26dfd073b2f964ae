"""Lists in pages: opaque cursors over the key of the last item, so that no page moves under the reader."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Query, Request
from starlette.responses import JSONResponse, Response

from adapterd.loader.errors import AdapterdError, Code, error

T = TypeVar("T")
Key = str | int | Sequence[str]

MAX_LIMIT = 1000

Cursor = Annotated[str | None, Query(max_length=2048)]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT)]


def reply(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return JSONResponse(body, status, headers=headers)


def page_reply(request: Request, items: Sequence[Mapping[str, Any]], following: Key | None) -> Response:
    """`{"items", "next"}`, and the same `next` as a Link header (RFC 8288)."""
    if following is None:
        return reply({"items": items, "next": None})
    cursor = encode_cursor(following)
    url = request.url.include_query_params(cursor=cursor)
    return reply({"items": items, "next": cursor}, headers={"Link": f'<{url.path}?{url.query}>; rel="next"'})


def cut(found: Sequence[T], limit: int, key: Callable[[T], Key]) -> tuple[Sequence[T], Key | None]:
    """The page out of `limit + 1` items that were asked for, and the key to continue after."""
    items = found[:limit]
    return items, key(items[-1]) if len(found) > limit else None


def encode_cursor(key: Key) -> str:
    """The key in a form that nobody is tempted to write by hand."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def text_cursor(cursor: str | None) -> str:
    """The key of a list by name or id; empty at the start. Raises Failed (REQUEST_INVALID)."""
    key = _decode(cursor, "")
    if isinstance(key, str) and _is_word(key):
        return key
    raise _invalid()


def number_cursor(cursor: str | None) -> int:
    """The key of a list by number; 0 at the start. Raises Failed (REQUEST_INVALID)."""
    key = _decode(cursor, 0)
    if type(key) is int and 0 <= key < 1 << 31:  # True is an int to Python, and no number to a database
        return key
    raise _invalid()


def pair_cursor(cursor: str | None) -> tuple[str, str]:
    """The key of a list by two names; empty ones at the start. Raises Failed (REQUEST_INVALID)."""
    match _decode(cursor, ["", ""]):
        case [str(first), str(second)] if _is_word(first) and _is_word(second):
            return first, second
    raise _invalid()


def _is_word(key: str) -> bool:
    """Names and ids are printable; NUL and half characters are nothing that every database takes."""
    return key.isprintable()


def _decode(cursor: str | None, start: Any) -> Any:
    if cursor is None:
        return start
    try:
        return json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        raise _invalid() from None


def _invalid() -> AdapterdError:
    return error(Code.REQUEST_INVALID, "cursor", "this cursor is not one of ours", "Use `next` of the page before.")
