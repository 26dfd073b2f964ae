"""Aliases: reading, moving under a precondition, and their history."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from adapterd.loader.errors import Code, error
from adapterd.loader.identity import check_name
from adapterd.registry.api.auth import CurrentCaller
from adapterd.registry.api.context import Context
from adapterd.registry.api.paging import Cursor, Limit, number_cursor, page_reply, reply
from adapterd.registry.api.preconditions import IfMatch, strong_tag
from adapterd.registry.api.views import alias_json, move_json
from adapterd.registry.tokens.interfaces import Scope

IfNoneMatch = Annotated[str | None, Header(alias="If-None-Match", max_length=256)]

_ALIAS = "/v1/tenants/{tenant}/adapters/{adapter}/aliases/{alias}"


class Target(BaseModel):
    """Body of `PUT …/aliases/{alias}`."""

    model_config = ConfigDict(extra="forbid")

    version_digest: str = Field(pattern=r"^(sha256:)?[0-9a-f]{64}$")


def routes(context: Context) -> APIRouter:
    """`/v1/tenants/{t}/adapters/{a}/aliases/{alias}` and its history."""
    router = APIRouter(tags=["aliases"])
    aliases = context.aliases

    @router.get(_ALIAS)
    def show(tenant: str, adapter: str, alias: str, caller: CurrentCaller) -> Response:
        """Where it points; the ETag is what a later PUT gives as If-Match."""
        caller.require(tenant, Scope.ADAPTERS_READ, adapter)
        info = aliases.get(tenant, adapter, alias)
        return reply(alias_json(info), headers={"ETag": f'"{info.version_digest}"'})

    @router.put(_ALIAS)
    def put(
        *, tenant: str, adapter: str, alias: str, body: Target, caller: CurrentCaller,
        if_match: IfMatch = None, if_none_match: IfNoneMatch = None,
    ) -> Response:  # fmt: skip
        """Point it to a version, if it still points where the caller thinks."""
        caller.require(tenant, Scope.ALIASES_PROMOTE, adapter)
        check_name("alias", alias)
        expected = _expected(if_match, if_none_match)
        digest = body.version_digest.removeprefix("sha256:")
        info = aliases.put(tenant, adapter, alias, digest, expected=expected, actor=caller.token_id)
        status = 201 if expected is None else 200
        return reply(alias_json(info), status, {"ETag": f'"{info.version_digest}"'})

    @router.get(_ALIAS + "/history")
    def history(
        *, request: Request, tenant: str, adapter: str, alias: str, caller: CurrentCaller,
        cursor: Cursor = None, limit: Limit = 100,
    ) -> Response:  # fmt: skip
        """Where it pointed, newest first."""
        caller.require(tenant, Scope.ADAPTERS_READ, adapter)
        below = number_cursor(cursor) if cursor is not None else None
        page = aliases.history(tenant, adapter, alias, below=below, limit=limit)
        return page_reply(request, [move_json(move) for move in page.items], page.next)

    return router


def _expected(if_match: str | None, if_none_match: str | None) -> str | None:
    """The digest that the alias must point to, or None where it must not exist.

    Raises:
        Conflict: PRECONDITION_REQUIRED without either header: a blind PUT would undo somebody's move.
        Failed: REQUEST_INVALID for anything but one strong tag, or `*`.
    """
    match if_match, if_none_match:
        case None, None:
            raise error(
                Code.PRECONDITION_REQUIRED, "If-Match", "moving an alias needs the digest that it points to now",
                'Send If-Match: "<digest>", or If-None-Match: * to make a new alias.',
            )  # fmt: skip
        case None, "*":
            return None
        case str(tag), None:
            return strong_tag(tag)
    raise error(
        Code.REQUEST_INVALID, "If-Match", "this precondition is not understood",
        'Send If-Match: "<digest>", or If-None-Match: * to make a new alias.',
    )  # fmt: skip
