"""Foreign text as it may be shown: one line, printable ASCII, of bounded length."""

from __future__ import annotations

MAX_SHOWN = 120


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """`value` as printable ASCII, everything else escaped, at most `limit` characters.

    Names in hostile files hold newlines, NULs, direction marks and 100 kB of letters; a `where` or a
    message repeats them only like this, so that a log line stays a line and a terminal stays sane.
    """
    text = str(value)[: limit + 1]
    safe = text.encode("unicode_escape").decode("ascii")
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."
