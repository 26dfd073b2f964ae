"""Authenticate: the first stage of every request under /v1, before a byte of its body is read."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapterd.loader.base_model import MAX_TABLE_BYTES
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.registry.api.problems import problem_response, remember
from adapterd.registry.errors import missing
from adapterd.registry.tokens.interfaces import Caller
from adapterd.registry.tokens.service import TokenService

PREFIX = "/v1/"
MAX_JSON_BYTES = 1 << 20
BASE_MODELS = "/v1/base-models"


class Authenticate:
    """ASGI middleware: puts the caller into the request's state, or answers 401; caps JSON bodies."""

    def __init__(self, app: ASGIApp, tokens: TokenService) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        try:
            bearer = _bearer(headers.get("Authorization", ""))
            state["caller"] = await run_in_threadpool(self._tokens.authenticate, bearer)
            if "\0" in scope["path"]:  # names nothing, and not every database takes it
                raise missing(scope["path"])
            limited = _limited(scope, headers, receive)
        except AdapterdError as caught:
            remember(scope, caught)
            await problem_response(caught, scope["path"])(scope, receive, send)
            return
        await self._app(scope, limited, send)


_documented = HTTPBearer(auto_error=False, description="A token as `adapterctl token create` shows it once.")


def _current_caller(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_documented)]
) -> Caller:
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


CurrentCaller = Annotated[Caller, Depends(_current_caller)]


def _bearer(header: str) -> str:
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer":
        raise error(Code.UNAUTHENTICATED, "Authorization", "no token was given", "Send `Authorization: Bearer adr…`.")
    return token.strip()


def _limited(scope: Scope, headers: Headers, receive: Receive) -> Receive:
    """Stop a JSON body at its cap. Raw bodies are PATCHed, and counted against what was declared."""
    if scope["method"] == "PATCH":
        return receive
    cap = MAX_TABLE_BYTES if scope["path"] == BASE_MODELS else MAX_JSON_BYTES
    declared = headers.get("Content-Length", "0")
    if not declared.isdigit() or int(declared) > cap:
        raise _too_large(cap)
    taken = 0

    async def counting() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > cap:
            raise _too_large(cap)
        return message

    return counting


def _too_large(cap: int) -> AdapterdError:
    return error(Code.QUOTA_EXCEEDED, "body", f"the body of this request may have at most {cap} bytes")
