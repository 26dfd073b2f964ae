"""Errors as RFC 9457 problem documents: every answer that is not a success is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from adapterd.loader.errors import AdapterdError, Code, Failed, NotFound, Problem, Unavailable, error, reject
from adapterd.registry.catalog.aliases import AliasChanged
from adapterd.registry.errors import MISSING_HINT, MISSING_MESSAGE
from adapterd.registry.uploads.interfaces import OffsetMismatch

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "/problems/"
MAX_VALIDATION_PROBLEMS = 20
MAX_PLACE_CHARS = 200  # of a field's name, which may be the caller's own invention

# Where HTTP has a better word than the code's category.
_STATUS: Mapping[Code, int] = {
    Code.PRECONDITION_FAILED: HTTPStatus.PRECONDITION_FAILED,
    Code.PRECONDITION_REQUIRED: HTTPStatus.PRECONDITION_REQUIRED,
    Code.RANGE_INVALID: HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
    Code.METHOD_NOT_ALLOWED: HTTPStatus.METHOD_NOT_ALLOWED,
    Code.REQUEST_INVALID: HTTPStatus.UNPROCESSABLE_ENTITY,
    Code.STORAGE_FULL: HTTPStatus.INSUFFICIENT_STORAGE,
    Code.SCHEMA_OUTDATED: HTTPStatus.SERVICE_UNAVAILABLE,
    Code.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
}
_RETRY_SECONDS = "5"

# What broke on the server's own machine: its operator is told where, in the log, and the caller that it did.
_OWN: Mapping[Code, str] = {
    Code.STORAGE_FULL: "the server's storage is full",
    Code.STORAGE_UNAVAILABLE: "the server's storage cannot be used now",
    Code.DATABASE_UNAVAILABLE: "the server's database cannot be used now",
    Code.SCHEMA_OUTDATED: "the server's database has to be upgraded",
}


class RangeInvalid(Failed):
    """The file has no such bytes; `size` is how many it has."""

    def __init__(self, size: int, message: str) -> None:
        super().__init__(reject(Code.RANGE_INVALID, "Range", message, "Ask for one range within the file."))
        self.size = size


def status_of(caught: AdapterdError) -> int:
    """The HTTP status of an error."""
    return int(_STATUS.get(caught.code, caught.http_status))


def remember(scope: Scope, caught: AdapterdError) -> None:
    """For the log: the code, and what the answer does not tell."""
    state = scope.setdefault("state", {})
    state["problem_code"] = caught.code.value
    if caught.code in _OWN:
        state["problem_detail"] = str(caught)


def problem_response(caught: AdapterdError, instance: str, status: int | None = None) -> Response:
    """The answer for an error, about the request path `instance`."""
    status = status or status_of(caught)
    return JSONResponse(
        _document(caught, instance, status), status, headers=_headers(caught, status), media_type=MEDIA_TYPE
    )


def install(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Turn everything that is raised below into problem documents."""

    async def own(request: Request, caught: Exception) -> Response:
        assert isinstance(caught, AdapterdError)
        return _respond(request, caught)

    async def http(request: Request, caught: Exception) -> Response:
        assert isinstance(caught, HTTPException)
        return _from_http(request, caught, routers)

    async def validation(request: Request, caught: Exception) -> Response:
        assert isinstance(caught, RequestValidationError)
        return _respond(request, _from_validation(caught))

    async def bug(request: Request, _caught: Exception) -> Response:
        message = "something went wrong in the server; its log says what"
        return _respond(request, error(Code.INTERNAL, "server", message, "Tell the registry's operator."))

    app.add_exception_handler(AdapterdError, own)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(Exception, bug)


def allowed_methods(routers: Sequence[APIRouter], path: str) -> list[str]:
    """All methods that routes have for this path: RFC 9110 §15.5.6 wants all, Starlette names one route's."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    return sorted({m for route in routes if route.path_regex.match(path) for m in route.methods or ()})


def _respond(request: Request, caught: AdapterdError) -> Response:
    remember(request.scope, caught)
    return problem_response(caught, request.url.path)


def _document(caught: AdapterdError, instance: str, status: int) -> dict[str, Any]:
    problems = [_neutral(p, instance) for p in caught.problems]
    first = problems[0]
    return {
        "type": TYPE_PREFIX + first.code.value.lower().replace("_", "-"),
        "title": first.code.value.replace("_", " ").capitalize(),
        "status": status,
        "detail": first.message,
        "instance": instance,
        "code": first.code.value,
        "where": first.where,
        "hint": first.hint,
        "problems": [p.as_json() for p in problems],
    }


def _neutral(problem: Problem, instance: str) -> Problem:
    """What is absent and what is foreign get the same words, wherever it was found out (I9)."""
    if problem.code in _OWN:
        return reject(problem.code, problem.where, _OWN[problem.code], problem.hint)
    if problem.code is not Code.NOT_FOUND:
        return problem
    return reject(Code.NOT_FOUND, instance, MISSING_MESSAGE, MISSING_HINT)


def _headers(caught: AdapterdError, status: int) -> dict[str, str]:
    headers = {"Cache-Control": "no-store"}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(caught, Unavailable):
        headers["Retry-After"] = _RETRY_SECONDS
    match caught:
        case OffsetMismatch(offset=offset):
            headers["Upload-Offset"] = str(offset)
        case RangeInvalid(size=size):
            headers["Content-Range"] = f"bytes */{size}"
        case AliasChanged(current=str(current)):
            headers["ETag"] = f'"{current}"'
    return headers


def _from_http(request: Request, caught: HTTPException, routers: Sequence[APIRouter]) -> Response:
    if isinstance(caught.__cause__, AdapterdError):  # raised while FastAPI read the body
        return _respond(request, caught.__cause__)
    if caught.status_code == HTTPStatus.NOT_FOUND:
        return _respond(request, NotFound(reject(Code.NOT_FOUND, request.url.path, MISSING_MESSAGE, MISSING_HINT)))
    if caught.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allow = ", ".join(allowed_methods(routers, request.url.path)) or "GET"
        response = _respond(
            request,
            error(Code.METHOD_NOT_ALLOWED, request.method, "this address has no such method", f"It has {allow}."),
        )
        response.headers["Allow"] = allow
        return response
    return _respond(request, error(Code.REQUEST_INVALID, "request", str(caught.detail)))


def _from_validation(caught: RequestValidationError) -> AdapterdError:
    """Where and why, never the value: it may be a secret."""
    found = [
        reject(Code.REQUEST_INVALID, ".".join(str(part) for part in e["loc"])[:MAX_PLACE_CHARS], str(e["msg"]))
        for e in caught.errors()[:MAX_VALIDATION_PROBLEMS]
    ]
    return Failed(*(found or [reject(Code.REQUEST_INVALID, "request", "is not what this address takes")]))
