"""The one answer for what is absent, foreign or out of a token's reach."""

from __future__ import annotations

from adapterd.loader.errors import Code, NotFound, reject

MISSING_MESSAGE = "no such object, or no access to it"
MISSING_HINT = "Check the name, the tenant, and what this token may do."


def missing(where: str) -> NotFound:
    """NotFound (NOT_FOUND) in the only words that the registry has for it (I9).

    `where` must be made from what the caller sent, never from what the registry knows, so that the
    whole answer is the same for an object of another tenant and for one that does not exist.
    """
    return NotFound(reject(Code.NOT_FOUND, where, MISSING_MESSAGE, MISSING_HINT))
