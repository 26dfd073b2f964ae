"""Tenants and their policies."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from adapterd.loader.errors import Code
from adapterd.loader.limits import Limits
from adapterd.registry.api.auth import CurrentCaller
from adapterd.registry.api.context import Context
from adapterd.registry.api.paging import Cursor, Limit, cut, page_reply, reply, text_cursor
from adapterd.registry.tenants.interfaces import TenantInfo, TenantPolicy
from adapterd.registry.tokens.interfaces import Scope


class NewTenant(BaseModel):
    """Body of `POST /v1/tenants`."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=64)


class Policy(BaseModel):
    """Body of `PUT …/policy`; `limits` holds what differs from the defaults, and stays as it is when left out."""

    model_config = ConfigDict(extra="forbid")

    require_signature: bool = True
    allow: list[Code] = Field(default_factory=list, max_length=64)
    refuse: list[Code] = Field(default_factory=list, max_length=64)
    limits: dict[str, Any] | None = None

    def checked(self, now: TenantPolicy) -> TenantPolicy:
        """Raises Failed (SETTINGS_INVALID)."""
        limits = now.limits if self.limits is None else Limits.from_json(self.limits)
        return TenantPolicy(self.require_signature, frozenset(self.allow), frozenset(self.refuse), limits)


def routes(context: Context) -> APIRouter:
    """`/v1/tenants` and `/v1/tenants/{t}/policy`."""
    router = APIRouter(tags=["tenants"])
    tenants = context.services.tenants

    @router.post("/v1/tenants", status_code=201)
    def create(body: NewTenant, caller: CurrentCaller) -> Response:
        """A new tenant, whose uploads must be signed."""
        caller.require(None, Scope.OPERATOR)
        return reply(_tenant(tenants.create(body.name, actor=caller.token_id)), 201)

    @router.get("/v1/tenants")
    def listed(request: Request, caller: CurrentCaller, cursor: Cursor = None, limit: Limit = 100) -> Response:
        """All tenants, by name."""
        caller.require(None, Scope.OPERATOR)
        found = tenants.list(after=text_cursor(cursor), limit=limit + 1)
        items, following = cut(found, limit, lambda info: info.name)
        return page_reply(request, [_tenant(info) for info in items], following)

    @router.get("/v1/tenants/{tenant}/policy")
    def policy(tenant: str, caller: CurrentCaller) -> Response:
        """What the tenant's uploads must keep to."""
        caller.require(tenant, Scope.KEYS_ADMIN)
        return reply(tenants.policy(tenant).as_json())

    @router.put("/v1/tenants/{tenant}/policy")
    def set_policy(tenant: str, body: Policy, caller: CurrentCaller) -> Response:
        """Replace the policy; it binds uploads that are finalized afterwards. Limits are the operator's to change."""
        caller.require(tenant, Scope.KEYS_ADMIN)
        wanted = body.checked(tenants.policy(tenant))
        return reply(tenants.set_policy(tenant, wanted, actor=caller.token_id, may_limit=caller.is_operator).as_json())

    return router


def _tenant(info: TenantInfo) -> dict[str, Any]:
    return {"name": info.name, "created_at": info.created_at.isoformat()}
