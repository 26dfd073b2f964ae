"""The keys that a tenant's publishers sign with."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from adapterd.loader.trust.keys import MAX_PEM_BYTES
from adapterd.registry.api.auth import CurrentCaller
from adapterd.registry.api.context import Context
from adapterd.registry.api.paging import Cursor, Limit, cut, page_reply, reply, text_cursor
from adapterd.registry.keys.interfaces import KeyInfo
from adapterd.registry.tokens.interfaces import Scope


class NewKey(BaseModel):
    """Body of `POST …/keys`."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=64)
    public_key_pem: str = Field(max_length=MAX_PEM_BYTES)


def routes(context: Context) -> APIRouter:
    """`/v1/tenants/{t}/keys`."""
    router = APIRouter(tags=["keys"])
    keys, tenants = context.services.keys, context.services.tenants

    @router.post("/v1/tenants/{tenant}/keys", status_code=201)
    def add(tenant: str, body: NewKey, caller: CurrentCaller) -> Response:
        """Trust a publisher's key."""
        caller.require(tenant, Scope.KEYS_ADMIN)
        return reply(_key(keys.add(tenant, body.name, body.public_key_pem, actor=caller.token_id)), 201)

    @router.get("/v1/tenants/{tenant}/keys")
    def listed(
        request: Request, tenant: str, caller: CurrentCaller, cursor: Cursor = None, limit: Limit = 100
    ) -> Response:
        """All keys, revoked ones too."""
        caller.require(tenant, Scope.KEYS_ADMIN)
        tenants.get(tenant)
        found = keys.list(tenant, after=text_cursor(cursor), limit=limit + 1)
        items, following = cut(found, limit, lambda info: info.key_id)
        return page_reply(request, [_key(info) for info in items], following)

    @router.post("/v1/tenants/{tenant}/keys/{key_id}:revoke")
    def revoke(tenant: str, key_id: str, caller: CurrentCaller) -> Response:
        """Trust a key no more."""
        caller.require(tenant, Scope.KEYS_ADMIN)
        return reply(_key(keys.revoke(tenant, key_id, actor=caller.token_id)))

    return router


def _key(info: KeyInfo) -> dict[str, Any]:
    return {
        "key_id": info.key_id,
        "name": info.name,
        "status": info.status,
        "public_key_pem": info.public_key_pem,
        "created_at": info.created_at.isoformat(),
        "revoked_at": info.revoked_at.isoformat() if info.revoked_at else None,
    }
