"""What a registry or the network says when it says no, as one of our errors.

A registry's words are shown to people, so they are cut and made printable; its code decides the class
only if it is one of ours.
"""

from __future__ import annotations

import httpx

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.formats.text import shown
from adapterd.loader.trust.strict_json import Malformed, parse

_LONGEST_WORDS = 400
_HINT_REGISTRY = "Is this the URL of an adapterd registry?"
_GATEWAY_STATUS = frozenset({502, 503, 504})


def refusal(status: int, body: bytes, url: str) -> AdapterdError:
    """The error for an answer that is no success: its problem+json if it is one, else by its status."""
    try:
        found = problem(parse(body), url)
    except Malformed:
        found = None
    if found is not None:
        return found
    if status == 401:
        return error(Code.UNAUTHENTICATED, url, "the registry wants a valid token", "Set ADAPTERD_TOKEN.")
    if status in _GATEWAY_STATUS:
        return error(Code.SERVER_UNREACHABLE, url, f"answers with status {status}", "Try again in a moment.")
    return error(Code.SERVER_ERROR, url, f"answers with status {status}", _HINT_REGISTRY)


def problem(value: object, url: str) -> AdapterdError | None:
    """The error that a problem object (RFC 9457, docs/surfaces.md) stands for; None if it is none of ours."""
    if not isinstance(value, dict) or not isinstance(code := value.get("code"), str) or code not in set(Code):
        return None
    where, detail, hint = (_words(value.get(name)) for name in ("where", "detail", "hint"))
    message = detail or _words(value.get("title")) or "no reason given"
    return error(Code(code), where or url, message, hint)


def _words(value: object) -> str:
    return shown(value, _LONGEST_WORDS) if isinstance(value, str) else ""


def unreachable(url: str, failure: httpx.HTTPError) -> AdapterdError:
    """The error for a request that got no whole answer."""
    match failure:
        case httpx.ConnectTimeout() | httpx.ConnectError():
            message = f"cannot be reached: {_words(str(failure)) or 'no connection'}"
        case httpx.TimeoutException():
            message = "did not answer in time"
        case httpx.UnsupportedProtocol():
            message = "this kind of URL is not supported"
        case _:
            message = f"the connection broke off: {_words(str(failure)) or type(failure).__name__}"
    return error(Code.SERVER_UNREACHABLE, url, message, "Is the registry running, and is the URL right?")
