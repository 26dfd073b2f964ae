"""A registry over HTTP. Every foreign error is narrowed to our tree here, in `_narrowed` and `_refusal`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self
from urllib.parse import quote

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from adapterd.loader.errors import AdapterdError, Code, NotFound, Unavailable, error
from adapterd.loader.identity import BasePin, Ref
from adapterd.loader.sources.interface import Resolved, check_alias_digest, not_found
from adapterd.loader.sources.problems import problem, refusal, unreachable
from adapterd.loader.trust.admission import MAX_ENVELOPE_BYTES
from adapterd.loader.trust.oms import MAX_BUNDLE_BYTES
from adapterd.loader.trust.strict_json import Fields, Malformed, parse

ATTEMPTS = 4
LONGEST_WAIT_S = 4.0
TIMEOUT = httpx.Timeout(30.0, connect=5.0)
MAX_ANSWER_BYTES = 1 << 20
ANSWER_SECONDS = 60.0
"""For the whole of an answer that is no file: `TIMEOUT` alone lets a byte every 29 seconds go on for ever."""


class RegistrySource:
    """Implements `Source` over the REST API of a registry (docs/surfaces.md).

    Args:
        url: of the registry, as in `http://127.0.0.1:8347`.
        token: a worker's or a user's.
        transport: an httpx transport, for tests and proxies.
        sleep: how a retry waits, in seconds.
        clock: seconds, for `ANSWER_SECONDS`.

    Raises:
        Failed: SETTINGS_INVALID if `url` is not an http(s) URL.
    """

    def __init__(
        self,
        url: str,
        token: str,
        transport: httpx.BaseTransport | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._token = _checked_url(url), token
        self._clock = clock
        self._client = httpx.Client(
            base_url=self._url,
            # Bytes as stored, or Range and digests would be about something else.
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            timeout=TIMEOUT,
            transport=transport,
        )
        self._retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.25, max=LONGEST_WAIT_S),
            retry=retry_if_exception(_may_work_later),
            sleep=sleep,
            reraise=True,
        )

    @property
    def url(self) -> str:
        return self._url

    @property
    def token(self) -> str:
        """A secret; for a loader process, which asks in the worker's stead."""
        return self._token

    # --- Source

    def resolve(self, ref: Ref, tenant: str) -> Resolved:
        if ref.tenant != tenant:
            raise not_found(ref)  # whether it is there is not even asked
        answer = self._ask("POST", "/v1/resolve", json={"refs": [str(ref)]})
        try:
            return _parse_resolved(answer, ref)
        except Malformed as e:
            raise self._malformed("/v1/resolve", e) from e

    def statement(self, version: Resolved) -> bytes:
        data = self._ask_or_none(self._path(version) + "/admission", MAX_ENVELOPE_BYTES)
        if data is None:
            raise error(
                Code.STATEMENT_MISSING, str(version.ref),
                f"{self._url} has no admission statement for this version",
                "Without it nothing is loaded; tell the registry's operator.",
            )  # fmt: skip
        return data

    def signature(self, version: Resolved) -> bytes | None:
        return self._ask_or_none(self._path(version) + "/signature", MAX_BUNDLE_BYTES)

    @contextmanager
    def read(self, version: Resolved, path: str, offset: int = 0) -> Iterator[Iterator[bytes]]:
        url = f"{self._path(version)}/files/{quote(path, safe='')}"
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        response = self._retrying(self._open, "GET", url, headers=headers)
        try:
            _check_start(response, offset, url)
            yield self._stream(response)
        finally:
            response.close()

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- requests

    def _path(self, version: Resolved) -> str:
        adapter = f"/v1/tenants/{version.tenant}/adapters/{version.adapter}"
        return f"{adapter}/versions/sha256:{version.version_digest}"

    def _ask_or_none(self, path: str, most: int) -> bytes | None:
        try:
            return self._ask("GET", path, most=most)
        except AdapterdError as e:
            if e.code is Code.NOT_FOUND:
                return None
            raise

    def _ask(self, method: str, path: str, *, most: int = MAX_ANSWER_BYTES, **request: Any) -> bytes:
        """The whole body of a 2xx answer, one byte over `most` at the most; every request is idempotent."""
        return self._retrying(self._ask_once, method, path, most, request)

    def _ask_once(self, method: str, path: str, most: int, request: dict[str, Any]) -> bytes:
        response = self._open(method, path, **request)
        try:
            return self._bounded(response, most)
        finally:
            response.close()

    def _open(self, method: str, path: str, **request: Any) -> httpx.Response:
        """An open 2xx answer whose body is not read yet; anything else becomes one of our errors."""
        with self._narrowed():
            response = self._client.send(self._client.build_request(method, path, **request), stream=True)
        if response.is_success:
            return response
        try:
            body = b"" if _is_encoded(response) else self._bounded(response, MAX_ANSWER_BYTES)
        finally:
            response.close()
        raise refusal(response.status_code, body, f"{self._url}{path}")

    def _bounded(self, response: httpx.Response, most: int) -> bytes:
        """The server is not asked how much will come, or when: it is cut off one byte after `most`, and in time."""
        found, deadline = bytearray(), self._clock() + ANSWER_SECONDS
        for block in self._stream(response):
            found += block
            if len(found) > most:
                return bytes(found[: most + 1])
            if self._clock() > deadline:
                raise error(
                    Code.SERVER_UNREACHABLE, self._url, f"no whole answer within {ANSWER_SECONDS:g} s",
                    "The network or a proxy in between is very slow.",
                )  # fmt: skip
        return bytes(found)

    def _stream(self, response: httpx.Response) -> Iterator[bytes]:
        if _is_encoded(response):
            raise error(Code.SERVER_ERROR, self._url, "answers with a compressed body, which was not asked for")
        with self._narrowed():
            yield from response.iter_bytes()

    @contextmanager
    def _narrowed(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as e:
            raise unreachable(self._url, e) from e

    def _malformed(self, path: str, why: Malformed) -> AdapterdError:
        return error(
            Code.SERVER_ERROR, f"{self._url}{path}", f"the answer is not what it must be: {why}",
            "Is this an adapterd registry of a matching release?",
        )  # fmt: skip


def _checked_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as e:
        raise error(Code.SETTINGS_INVALID, "url", f"{url[:160]!r} is not a URL: {e}") from e
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise error(
            Code.SETTINGS_INVALID,
            "url",
            f"{url[:160]!r} is not an http or https URL",
            "As in http://127.0.0.1:8347.",
        )
    return url.rstrip("/")


def _may_work_later(failure: BaseException) -> bool:
    """No connection, a gateway's 502 to 504, a registry that says it is unavailable; no wrong answer."""
    return isinstance(failure, Unavailable) and failure.code is not Code.SERVER_ERROR


def _is_encoded(response: httpx.Response) -> bool:
    """A compressed body was not asked for, and might unpack to anything."""
    return bool(response.headers.get("Content-Encoding", "identity") != "identity")


def _check_start(response: httpx.Response, offset: int, url: str) -> None:
    """The bytes must begin where they were asked to, or a resumed file would be a patchwork."""
    if offset == 0:
        return
    content_range = response.headers.get("Content-Range", "")
    if response.status_code != 206 or not content_range.startswith(f"bytes {offset}-"):
        raise error(
            Code.SERVER_ERROR, url,
            f"asked for bytes from {offset}, got status {response.status_code} {content_range[:80]!r}",
            "A proxy in between may drop Range headers.",
        )  # fmt: skip


def _parse_resolved(data: bytes, ref: Ref) -> Resolved:
    """Raises Malformed, and what the registry says about this reference."""
    items = Fields(parse(data), "", need={"items"}).items("items", most=1)
    if len(items) != 1 or not isinstance(items[0], dict):
        raise Malformed("items", "must hold one entry")
    if "problem" in items[0]:
        found = problem(items[0]["problem"], str(ref)) or Malformed("items[0].problem", "is no problem of ours")
        raise not_found(ref) if isinstance(found, NotFound) else found
    need = {"ref", "tenant", "adapter", "version_digest", "number", "base", "state"}
    item = Fields(items[0], "items[0]", need=need, may=items[0].keys())
    for name, wanted in [("ref", str(ref)), ("tenant", ref.tenant), ("adapter", ref.name)]:
        item.exactly(name, wanted)
    digest = item.hex64("version_digest")
    if item.text("state") == "quarantined":
        raise error(Code.VERSION_WITHDRAWN, str(ref), "this version is quarantined")
    check_alias_digest(ref, digest)
    pin = Fields(item.raw("base"), "items[0].base", need={"id", "revision", "module_table_digest"})
    base = BasePin(pin.text("id"), pin.text("revision"), pin.hex64("module_table_digest"))
    number = item.integer("number", least=1)
    return Resolved(replace(ref, digest=digest), ref.tenant, ref.name, digest, number, base)
