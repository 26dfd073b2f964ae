"""Base models: the operator registers them, everybody may read them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request
from starlette.responses import Response

from adapterd.loader.base_model import MAX_ID_LENGTH, BaseSpec
from adapterd.registry.admission import registered_base
from adapterd.registry.api.auth import CurrentCaller
from adapterd.registry.api.context import Context
from adapterd.registry.api.paging import Cursor, Limit, cut, page_reply, pair_cursor, reply
from adapterd.registry.base_models.interfaces import BaseModelInfo
from adapterd.registry.tokens.interfaces import Scope


def routes(context: Context) -> APIRouter:
    """`/v1/base-models` and `/v1/base-models/table`."""
    router = APIRouter(tags=["base models"])
    base_models = context.services.base_models

    @router.post("/v1/base-models", status_code=201)
    def add(body: Annotated[dict[str, Any], Body()], caller: CurrentCaller) -> Response:
        """Register a base model by its module table (`adapterd.base/1`); the same again changes nothing."""
        caller.require(None, Scope.OPERATOR)
        return reply(_base(base_models.add(BaseSpec.from_json(body), actor=caller.token_id)), 201)

    @router.get("/v1/base-models")
    def listed(request: Request, caller: CurrentCaller, cursor: Cursor = None, limit: Limit = 100) -> Response:
        """All base models, by id and revision."""
        found = base_models.list(after=pair_cursor(cursor), limit=limit + 1)
        items, following = cut(found, limit, lambda info: (info.pin.id, info.pin.revision))
        return page_reply(request, [_base(info) for info in items], following)

    @router.get("/v1/base-models/table")
    def table(
        caller: CurrentCaller,
        base_id: Annotated[str, Query(alias="id", max_length=MAX_ID_LENGTH)],
        revision: Annotated[str, Query(max_length=71)],
    ) -> Response:
        """The module table that uploads are checked against."""
        spec = registered_base(base_models, base_id, revision)
        return reply(spec.as_json(), headers={"ETag": f'"{spec.table_digest}"'})

    return router


def _base(info: BaseModelInfo) -> dict[str, Any]:
    return {
        **info.pin.as_json(),
        "modules": info.modules,
        "alternatives": list(info.alternatives),
        "weights_digest": info.weights_digest,
        "created_at": info.created_at.isoformat(),
    }
