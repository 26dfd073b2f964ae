"""Tokens of a tenant."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from adapterd.registry.api.auth import CurrentCaller
from adapterd.registry.api.context import Context
from adapterd.registry.api.paging import Cursor, Limit, cut, page_reply, reply, text_cursor
from adapterd.registry.tenants.service import TenantService
from adapterd.registry.tokens.interfaces import Caller, Scope, TokenInfo
from adapterd.registry.tokens.service import TokenService


class NewToken(BaseModel):
    """Body of `POST …/tokens`. `adapters` are patterns of adapter names."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["u", "s", "w"]
    scopes: list[str] = Field(min_length=1, max_length=16)
    expires_in_days: int
    adapters: list[str] = Field(default_factory=lambda: ["*"], min_length=1, max_length=64)


def routes(context: Context) -> APIRouter:
    """`/v1/tenants/{t}/tokens`, and `/v1/tokens` for the operator's own: workers that serve all tenants."""
    router = APIRouter(tags=["tokens"])
    _of_tenants(router, context.services.tokens, context.services.tenants)
    _of_the_operator(router, context.services.tokens)
    return router


def _of_tenants(router: APIRouter, tokens: TokenService, tenants: TenantService) -> None:
    @router.post("/v1/tenants/{tenant}/tokens", status_code=201)
    def create_of_tenant(tenant: str, body: NewToken, caller: CurrentCaller) -> Response:
        """A new token of a tenant."""
        caller.require(tenant, Scope.TOKENS_ADMIN)
        return _created(tokens, tenant, body, caller)

    @router.get("/v1/tenants/{tenant}/tokens")
    def list_of_tenant(
        request: Request, tenant: str, caller: CurrentCaller, cursor: Cursor = None, limit: Limit = 100
    ) -> Response:
        """The tokens of a tenant."""
        caller.require(tenant, Scope.TOKENS_ADMIN)
        tenants.get(tenant)
        return _page(tokens, request, tenant, cursor, limit)

    @router.delete("/v1/tenants/{tenant}/tokens/{token_id}", status_code=204)
    def revoke_of_tenant(tenant: str, token_id: str, caller: CurrentCaller) -> Response:
        """End a token of a tenant now."""
        caller.require(tenant, Scope.TOKENS_ADMIN)
        tokens.revoke(tenant, token_id, actor=caller.token_id)
        return Response(status_code=204)


def _of_the_operator(router: APIRouter, tokens: TokenService) -> None:
    @router.post("/v1/tokens", status_code=201)
    def create_of_operator(body: NewToken, caller: CurrentCaller) -> Response:
        """A new token that belongs to no tenant and is good for its scopes in all of them."""
        caller.require(None, Scope.OPERATOR)
        return _created(tokens, None, body, caller)

    @router.get("/v1/tokens")
    def list_of_operator(
        request: Request, caller: CurrentCaller, cursor: Cursor = None, limit: Limit = 100
    ) -> Response:
        """The tokens that belong to no tenant."""
        caller.require(None, Scope.OPERATOR)
        return _page(tokens, request, None, cursor, limit)

    @router.delete("/v1/tokens/{token_id}", status_code=204)
    def revoke_of_operator(token_id: str, caller: CurrentCaller) -> Response:
        """End a token that belongs to no tenant now."""
        caller.require(None, Scope.OPERATOR)
        tokens.revoke(None, token_id, actor=caller.token_id)
        return Response(status_code=204)


def _created(tokens: TokenService, tenant: str | None, body: NewToken, caller: Caller) -> Response:
    """A new token; its text is in this answer and nowhere else."""
    info, text = tokens.issue(
        tenant, kind=body.kind, scopes=body.scopes, expires_in_days=body.expires_in_days,
        adapters=body.adapters, actor=caller.token_id, giver=caller,
    )  # fmt: skip
    return reply({**_token(info), "token": text}, 201, {"Cache-Control": "no-store"})


def _page(tokens: TokenService, request: Request, tenant: str | None, cursor: str | None, limit: int) -> Response:
    """All tokens without their text, revoked and expired ones too."""
    found = tokens.list(tenant, after=text_cursor(cursor), limit=limit + 1)
    items, following = cut(found, limit, lambda info: info.id)
    return page_reply(request, [_token(info) for info in items], following)


def _token(info: TokenInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "kind": info.kind,
        "scopes": sorted(info.scopes),
        "adapters": list(info.adapters),
        "created_at": info.created_at.isoformat(),
        "created_by": info.created_by,
        "expires_at": info.expires_at.isoformat(),
        "revoked_at": info.revoked_at.isoformat() if info.revoked_at else None,
    }
