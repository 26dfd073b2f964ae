"""Adapters and their versions: lists, details, files, and taking versions out of service."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from adapterd.loader.identity import SIGNATURE_FILE, FileEntry
from adapterd.registry.api.auth import CurrentCaller
from adapterd.registry.api.context import Context
from adapterd.registry.api.paging import Cursor, Limit, number_cursor, page_reply, reply, text_cursor
from adapterd.registry.api.streaming import file_response
from adapterd.registry.api.views import adapter_json, detail_json, version_json
from adapterd.registry.catalog.interfaces import VersionState
from adapterd.registry.errors import missing
from adapterd.registry.tokens.interfaces import Caller, Scope

DSSE_TYPE = "application/vnd.dsse+json"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
FILE_TYPE = "application/octet-stream"  # never sniffed, never shown by a browser

_STATES = {
    "yank": VersionState.YANKED,
    "quarantine": VersionState.QUARANTINED,
    "release": VersionState.ACTIVE,
}
_ADAPTERS = "/v1/tenants/{tenant}/adapters"
_VERSION = _ADAPTERS + "/{adapter}/versions/{version}"


def routes(context: Context) -> APIRouter:
    """`/v1/tenants/{t}/adapters` down to the bytes of a version."""
    router = APIRouter(tags=["adapters"])
    for add in (_add_adapters, _add_versions, _add_files, _add_moves):
        add(router, context)
    return router


def _add_adapters(router: APIRouter, context: Context) -> None:
    adapters = context.adapters

    @router.get(_ADAPTERS)
    def listed(
        request: Request, tenant: str, caller: CurrentCaller, cursor: Cursor = None, limit: Limit = 100
    ) -> Response:
        """The adapters that the token covers, by name; a page may hold fewer than `limit`."""
        caller.require(tenant, Scope.ADAPTERS_READ)
        page = adapters.list(tenant, after=text_cursor(cursor), limit=limit)
        items = [adapter_json(info) for info in page.items if caller.covers(info.name)]
        return page_reply(request, items, page.next)

    @router.get(_ADAPTERS + "/{adapter}")
    def adapter_shown(tenant: str, adapter: str, caller: CurrentCaller) -> Response:
        """One adapter."""
        caller.require(tenant, Scope.ADAPTERS_READ, adapter)
        return reply(adapter_json(adapters.get(tenant, adapter)))


def _add_versions(router: APIRouter, context: Context) -> None:
    versions = context.versions

    @router.get(_ADAPTERS + "/{adapter}/versions")
    def versions_listed(
        *,
        request: Request,
        tenant: str,
        adapter: str,
        caller: CurrentCaller,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> Response:
        """Its versions, oldest first."""
        caller.require(tenant, Scope.ADAPTERS_READ, adapter)
        page = versions.list(tenant, adapter, after=number_cursor(cursor), limit=limit)
        return page_reply(request, [version_json(info) for info in page.items], page.next)

    @router.get(_VERSION)
    def version_shown(tenant: str, adapter: str, version: str, caller: CurrentCaller) -> Response:
        """One version, by number or `sha256:…`, with its manifest."""
        caller.require(tenant, Scope.ADAPTERS_READ, adapter)
        detail = versions.get(tenant, adapter, version)
        return reply(detail_json(detail), headers={"ETag": f'"{detail.info.version_digest}"'})


def _add_files(router: APIRouter, context: Context) -> None:
    """The bytes of a version, and who vouches for them."""
    versions, blobs = context.versions, context.blobs

    @router.get(_VERSION + "/files/{path}")
    async def file(
        *, request: Request, tenant: str, adapter: str, version: str, path: str, caller: CurrentCaller
    ) -> Response:
        """The bytes of one file; one Range at a time."""
        caller.require(tenant, Scope.ADAPTERS_READ, adapter)
        entry = await run_in_threadpool(_stored, context, tenant, adapter, version, path)
        return await file_response(request, blobs, tenant, entry, FILE_TYPE, partial(context.lanes.on_disk, caller))

    @router.get(_VERSION + "/signature")
    async def signature(request: Request, tenant: str, adapter: str, version: str, caller: CurrentCaller) -> Response:
        """The publisher's signature; 404 where there is none."""
        caller.require(tenant, Scope.ADAPTERS_READ, adapter)
        entry = await run_in_threadpool(_stored, context, tenant, adapter, version, SIGNATURE_FILE)
        return await file_response(request, blobs, tenant, entry, BUNDLE_TYPE, partial(context.lanes.on_disk, caller))

    @router.get(_VERSION + "/admission")
    def admission(tenant: str, adapter: str, version: str, caller: CurrentCaller) -> Response:
        """The service's signed admission statement."""
        caller.require(tenant, Scope.ADAPTERS_READ, adapter)
        return Response(versions.statement(tenant, adapter, version), media_type=DSSE_TYPE)


def _add_moves(router: APIRouter, context: Context) -> None:
    """Out of service, and back."""

    @router.post(_VERSION + ":yank")
    def yank(tenant: str, adapter: str, version: str, caller: CurrentCaller) -> Response:
        """Serve it only to those who name its digest."""
        return _moved(context, caller, (tenant, adapter, version), "yank")

    @router.post(_VERSION + ":quarantine")
    def quarantine(tenant: str, adapter: str, version: str, caller: CurrentCaller) -> Response:
        """Serve it to nobody."""
        return _moved(context, caller, (tenant, adapter, version), "quarantine")

    @router.post(_VERSION + ":release")
    def release(tenant: str, adapter: str, version: str, caller: CurrentCaller) -> Response:
        """Serve it again."""
        return _moved(context, caller, (tenant, adapter, version), "release")


def _stored(context: Context, tenant: str, adapter: str, version: str, path: str) -> FileEntry:
    info = context.versions.info(tenant, adapter, version)
    signature = [info.signature] if info.signature else []
    for entry in (*info.files, *signature):
        if entry.path == path:
            return entry
    raise missing(path)


def _moved(
    context: Context,
    caller: Caller,
    place: tuple[str, str, str],
    verb: Literal["yank", "quarantine", "release"],
) -> Response:
    """What is served under a name changes, so it takes the right to move names."""
    tenant, adapter, version = place
    caller.require(tenant, Scope.ALIASES_PROMOTE, adapter)
    info = context.versions.set_state(tenant, adapter, version, _STATES[verb], actor=caller.token_id)
    return reply(version_json(info), headers={"ETag": f'"{info.version_digest}"'})
