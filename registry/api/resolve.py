"""References to versions, many at once: what workers ask before they load."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from adapterd.registry.api.auth import CurrentCaller
from adapterd.registry.api.context import Context
from adapterd.registry.api.paging import reply
from adapterd.registry.api.views import resolved_json

MAX_REFS = 1000
# tenant/name:alias@sha256:… with names of 64 characters
MAX_REF_CHARS = 3 * 64 + 3 + len("sha256:") + 64


class Wanted(BaseModel):
    """Body of `POST /v1/resolve`."""

    model_config = ConfigDict(extra="forbid")

    refs: list[Annotated[str, Field(max_length=MAX_REF_CHARS)]] = Field(max_length=MAX_REFS)


def routes(context: Context) -> APIRouter:
    """`/v1/resolve`."""
    router = APIRouter(tags=["resolve"])

    @router.post("/v1/resolve")
    def resolve(body: Wanted, caller: CurrentCaller) -> Response:
        """One item a reference, in order: a version, or the problem with it."""
        found = context.resolver.resolve(caller, body.refs)
        return reply({"items": [resolved_json(ref, item) for ref, item in zip(body.refs, found, strict=True)]})

    return router
