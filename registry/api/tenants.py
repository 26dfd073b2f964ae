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
from adapterd.registry.api.preconditions import IfMatch, strong_tag
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
        return _policy(tenants.policy(tenant))

    @router.put("/v1/tenants/{tenant}/policy")
    def set_policy(tenant: str, body: Policy, caller: CurrentCaller, if_match: IfMatch = None) -> Response:
        """Replace the policy, with If-Match only the one that was seen; it binds uploads that are finalized afterwards.

        Limits are the operator's to change.
        """
        caller.require(tenant, Scope.KEYS_ADMIN)
        expected = strong_tag(if_match) if if_match is not None else None
        made = tenants.set_policy(
            tenant, body.checked, actor=caller.token_id, may_limit=caller.is_operator, expected=expected
        )
        return _policy(made)

    return router


def _policy(policy: TenantPolicy) -> Response:
    return reply(policy.as_json(), headers={"ETag": f'"{policy.policy_id}"'})


def _tenant(info: TenantInfo) -> dict[str, Any]:
    return {"name": info.name, "created_at": info.created_at.isoformat()}
