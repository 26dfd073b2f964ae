"""Upload sessions: declare, send in pieces, finalize."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from adapterd.loader.base_model import MAX_ID_LENGTH
from adapterd.loader.errors import Code, Refused, error_from
from adapterd.loader.identity import FileEntry, check_name, check_revision, version_digest
from adapterd.registry.admission import budget, receive, registered_base
from adapterd.registry.api.auth import CurrentCaller
from adapterd.registry.api.context import Context
from adapterd.registry.api.lanes import owner_of
from adapterd.registry.api.paging import reply
from adapterd.registry.api.streaming import pour
from adapterd.registry.api.views import detail_json
from adapterd.registry.tokens.interfaces import Caller, Scope
from adapterd.registry.uploads.finalize import unless_closed
from adapterd.registry.uploads.interfaces import NewUpload, Upload, UploadState

MAX_DECLARED_FILES = 1000  # the tenant's limit is what counts; this bounds the work of saying so
_CLIENT_GONE = 499

IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$")
]
UploadOffset = Annotated[int, Header(alias="Upload-Offset", ge=0, lt=1 << 62)]


class WantedBase(BaseModel):
    """Which registered base model the adapter is for."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(max_length=MAX_ID_LENGTH)
    revision: str = Field(max_length=71)


class DeclaredFile(BaseModel):
    """One file to come: its name, size in bytes and SHA-256 (hex)."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, max_length=255)
    size: int = Field(ge=0, lt=1 << 62)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Declaration(BaseModel):
    """Body of `POST …/uploads`."""

    model_config = ConfigDict(extra="forbid")

    adapter: str = Field(max_length=64)
    base: WantedBase
    files: list[DeclaredFile] = Field(max_length=MAX_DECLARED_FILES)  # none at all is refused by name
    allow: list[Code] = Field(default_factory=list, max_length=64)
    alias: str | None = Field(default=None, max_length=64)

    def checked(self) -> NewUpload:
        """Raises Failed (REF_INVALID)."""
        return NewUpload(
            check_name("adapter", self.adapter),
            self.base.id,
            check_revision(self.base.revision),
            tuple(FileEntry(f.path, f.sha256, f.size) for f in self.files),
            frozenset(self.allow),
            check_name("alias", self.alias) if self.alias is not None else None,
        )


def routes(context: Context) -> APIRouter:
    """`/v1/tenants/{t}/uploads`."""
    router = APIRouter(tags=["uploads"])
    desk = _Desk(context)

    @router.post("/v1/tenants/{tenant}/uploads", status_code=201)
    def create(
        tenant: str, body: Declaration, caller: CurrentCaller, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """Declare the files of a version. The same Idempotency-Key gives the same session again."""
        upload = desk.create(tenant, body.checked(), caller, idempotency_key)
        return reply(desk.shown(upload), 201)

    @router.get("/v1/tenants/{tenant}/uploads/{upload_id}")
    def show(tenant: str, upload_id: str, caller: CurrentCaller) -> Response:
        """How much of each file is here, and what came of the upload."""
        return reply(desk.shown(desk.find(tenant, upload_id, caller)))

    @router.patch("/v1/tenants/{tenant}/uploads/{upload_id}/files/{path}", status_code=204)
    async def send(
        *,
        request: Request,
        tenant: str,
        upload_id: str,
        path: str,
        caller: CurrentCaller,
        offset: UploadOffset,
    ) -> Response:
        """Append the raw body to a file at Upload-Offset; what was received is kept, however the request ends."""
        upload = await run_in_threadpool(desk.find, tenant, upload_id, caller)
        return await desk.take(request, upload, path, offset, caller)

    @router.delete("/v1/tenants/{tenant}/uploads/{upload_id}", status_code=204)
    def cancel(tenant: str, upload_id: str, caller: CurrentCaller) -> Response:
        """Forget the session and its bytes; a version that came of it stays."""
        desk.find(tenant, upload_id, caller)
        context.uploads.cancel(tenant, upload_id)
        return Response(status_code=204)

    @router.post("/v1/tenants/{tenant}/uploads/{upload_id}:finalize", status_code=202)
    async def finalize(tenant: str, upload_id: str, caller: CurrentCaller) -> Response:
        """Make a version of it. Safe to repeat; `processing` means that another request is at it."""
        return reply(await desk.finalize(tenant, upload_id, caller), 202)

    return router


class _Desk:
    """What the routes do, with the caller's rights checked first."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def create(self, tenant: str, new: NewUpload, caller: Caller, key: str | None) -> Upload:
        c = self._context
        _require_upload(caller, tenant, new.adapter, new.alias)
        budget(new, c.services.tenants.policy(tenant))
        base = registered_base(c.services.base_models, new.base_id, new.base_revision)
        c.versions.require_room(tenant, new.adapter, version_digest(new.files), base.pin)
        return c.uploads.create(tenant, new, actor=caller.token_id, idempotency_key=key)

    def find(self, tenant: str, upload_id: str, caller: Caller) -> Upload:
        caller.require(tenant, Scope.ADAPTERS_UPLOAD)
        upload = self._context.uploads.get(tenant, upload_id)
        caller.require(tenant, Scope.ADAPTERS_UPLOAD, upload.adapter)
        return self._context.admission.view(upload)

    async def take(self, request: Request, upload: Upload, path: str, offset: int, caller: Caller) -> Response:
        c, on_disk = self._context, partial(self._context.lanes.on_disk, caller)
        policy = await run_in_threadpool(c.services.tenants.policy, upload.tenant)
        length = request.headers.get("Content-Length", "0")
        with ExitStack() as stack:
            receiver = await run_in_threadpool(stack.enter_context, c.uploads.receiver(upload, path, offset))
            try:
                receiver.expect(int(length) if length.isdigit() else 0)
                await pour(request, lambda data: receive(receiver, data, policy.limits), on_disk)
                await on_disk(receiver.sync)
            except Refused as caught:
                await on_disk(partial(c.admission.refuse, upload, caught.problems))
                raise
            except ClientDisconnect:
                return Response(status_code=_CLIENT_GONE)  # nobody reads it
            finally:
                c.observer.received(upload, path, receiver.offset - offset)
            return Response(status_code=204, headers={"Upload-Offset": str(receiver.offset)})

    async def finalize(self, tenant: str, upload_id: str, caller: Caller) -> dict[str, Any]:
        """Waits its turn, unless there is nothing to wait for."""
        c = self._context
        async with c.lanes.calls.turn(owner_of(caller)):
            upload = await run_in_threadpool(self.find, tenant, upload_id, caller)
            _require_upload(caller, tenant, upload.adapter, upload.alias)
        with c.admission.alone(upload_id) as alone:
            if alone and not upload.closed:
                return await c.lanes.as_check(caller, partial(self._finished, tenant, upload_id, caller))
        return await run_in_threadpool(self._outcome, unless_closed(upload))

    def _finished(self, tenant: str, upload_id: str, caller: Caller) -> dict[str, Any]:
        return self._outcome(self._context.admission.finish(tenant, upload_id, actor=caller.token_id))

    def _outcome(self, closed: Upload) -> dict[str, Any]:
        """Raises the refusals of an upload that was refused."""
        if closed.state is UploadState.REFUSED:
            # Refusals come first among the problems; the warnings beside them are told, too.
            raise type(error_from(closed.problems))(*closed.problems)
        return self.shown(closed)

    def shown(self, upload: Upload) -> dict[str, Any]:
        version = None
        if upload.number is not None:
            version = detail_json(self._context.versions.get(upload.tenant, upload.adapter, str(upload.number)))
        return {
            "id": upload.id,
            "state": upload.state.value,
            "adapter": upload.adapter,
            "base": {"id": upload.base_id, "revision": upload.base_revision},
            "files": [
                {
                    "path": f.declared.path,
                    "size": f.declared.size,
                    "sha256": f.declared.sha256,
                    "offset": f.offset,
                }
                for f in upload.files
            ],
            "allow": sorted(code.value for code in upload.allow),
            "alias": upload.alias,
            "expires_at": upload.expires_at.isoformat(),
            "version": version,
            "problems": [p.as_json() for p in upload.problems],
        }


def _require_upload(caller: Caller, tenant: str, adapter: str, alias: str | None) -> None:
    """Whoever uploads with an alias moves it, too."""
    caller.require(tenant, Scope.ADAPTERS_UPLOAD, adapter)
    if alias is not None:
        caller.require(tenant, Scope.ALIASES_PROMOTE, adapter)
