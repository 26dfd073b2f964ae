"""HTTP with narrowed errors: out of here come JSON, bytes, or an AdapterdError with the server's own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import httpx

from adapterd.loader.errors import AdapterdError, Code, Problem, Unavailable, error, error_from, reject

TIMEOUT = httpx.Timeout(60.0, connect=10.0)
"""Seconds."""

PATIENT = httpx.Timeout(None, connect=10.0)
"""For an answer that takes as long as the work, such as hashing gigabytes; connecting takes no longer."""

PAGE = 200
"""Items asked for at a time."""

MAX_DIAGNOSIS = 300
"""Characters of a strange answer that are worth repeating."""

_BY_STATUS = {
    401: Code.UNAUTHENTICATED,
    403: Code.NOT_FOUND,
    404: Code.NOT_FOUND,
    409: Code.CONFLICT,
    412: Code.PRECONDITION_FAILED,
    413: Code.QUOTA_EXCEEDED,
    416: Code.RANGE_INVALID,
    428: Code.PRECONDITION_REQUIRED,
}
TOKEN_HINT = "Set ADAPTERD_TOKEN or store a token with `adapterctl token save`."  # noqa: S105


def segment(name: str) -> str:
    """One part of a path; nothing in it can lead elsewhere."""
    return quote(name, safe=":") if name not in (".", "..") else quote(name).replace(".", "%2E")


class Transport:
    """One server and one token.

    Args:
        url: the server's address.
        token: sent as bearer, or None.
        transport: httpx's port, for a server in the same process.
    """

    def __init__(self, url: str, token: str | None, *, transport: httpx.BaseTransport | None = None) -> None:
        headers = {"Accept": "application/json", "User-Agent": "adapterctl"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._url = url
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, transport=transport)
        except httpx.InvalidURL as fault:
            raise error(Code.SETTINGS_INVALID, "ADAPTERD_URL", f"is not an address: {fault}") from fault

    def close(self) -> None:
        self._http.close()

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Raises AdapterdError for everything that is not a 2xx."""
        try:
            response = self._http.request(method, path, **options)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as fault:
            raise error(Code.SETTINGS_INVALID, "ADAPTERD_URL", f"cannot be used: {fault}") from fault
        except httpx.TransportError as fault:
            raise _unreachable(self._url, fault) from fault
        except httpx.HTTPError as fault:
            raise error(Code.SERVER_ERROR, self._url, f"the answer cannot be read: {fault}") from fault
        if not response.is_success:
            raise problem_of(response)
        return response

    def json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """The object in the answer."""
        return json_object(self.send(method, path, **options))

    def items(self, path: str, params: Mapping[str, str | int] | None = None) -> Iterator[dict[str, Any]]:
        """All items of a collection, page after page."""
        cursor: str | None = None
        while True:
            query: dict[str, str | int] = {"limit": PAGE, **(params or {})}
            if cursor:
                query["cursor"] = cursor
            page = self.json("GET", path, params=query)
            yield from page.get("items", [])
            following = page.get("next")
            if not following or following == cursor:
                return
            cursor = str(following)


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The answer's JSON object. Raises Unavailable (SERVER_ERROR) if it is none."""
    try:
        body = response.json()
    except ValueError as fault:
        raise _stranger(response) from fault
    if not isinstance(body, dict):
        raise _stranger(response)
    return body


def problem_of(response: httpx.Response) -> AdapterdError:
    """The problems of a refusal (RFC 9457), or the nearest code for an answer without them."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return _by_status(response, "")
    listed = body.get("problems")
    found = [p for p in map(parsed_problem, listed if isinstance(listed, list) else []) if p is not None]
    if not any(p.severity == "reject" for p in found):
        return _by_status(response, str(body.get("detail") or body.get("title") or ""))
    hinted = [_with_token_hint(p) for p in found]
    told = type(error_from(hinted))(*hinted)  # the warnings beside a refusal are told, too
    if response.status_code >= 500 and not isinstance(told, Unavailable):
        p = told.problem  # whatever broke there, it was not the caller's doing
        return error(Code.SERVER_ERROR, p.where, f"{p.message} ({p.code})", p.hint)
    return told


def parsed_problem(fields: object) -> Problem | None:
    """A Problem, or None for what this version cannot read."""
    if not isinstance(fields, dict):
        return None
    texts = {k: str(v) for k, v in fields.items() if v is not None}
    try:
        return Problem.from_json(texts)
    except (ValueError, KeyError):
        return None


def _with_token_hint(problem: Problem) -> Problem:
    """The server speaks of HTTP headers; who types commands needs to know where a token is put."""
    if problem.code is not Code.UNAUTHENTICATED:
        return problem
    return reject(problem.code, problem.where or "token", problem.message, TOKEN_HINT)


def _by_status(response: httpx.Response, detail: str) -> AdapterdError:
    status = response.status_code
    if response.is_redirect:
        return error(Code.SERVER_ERROR, str(response.url), f"redirects to {response.headers.get('location', '')!r}")
    code = Code.SERVER_ERROR if status >= 500 or status == 429 else _BY_STATUS.get(status, Code.REQUEST_INVALID)
    hint = TOKEN_HINT if code is Code.UNAUTHENTICATED else ""
    return error(code, response.request.url.path, detail[:MAX_DIAGNOSIS] or f"the server answered {status}", hint)


def _stranger(response: httpx.Response) -> AdapterdError:
    hint = "Is ADAPTERD_URL the address of an adapterd server?"
    return error(Code.SERVER_ERROR, str(response.url), "the answer is no JSON object", hint)


def _unreachable(url: str, fault: httpx.TransportError) -> AdapterdError:
    kind = "did not answer in time" if isinstance(fault, httpx.TimeoutException) else "cannot be reached"
    reason = str(fault) or type(fault).__name__
    hint = "Check ADAPTERD_URL, and that the server runs (`adapterctl serve`)."
    return error(Code.SERVER_UNREACHABLE, url, f"{kind}: {reason}", hint)
