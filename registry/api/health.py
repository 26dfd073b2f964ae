"""Is it alive, is it ready, how is it doing, and who am I to it."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from adapterd.registry.api.auth import CurrentCaller
from adapterd.registry.api.context import Context
from adapterd.registry.api.paging import reply


def routes(context: Context) -> APIRouter:
    """`/healthz`, `/readyz`, `/metrics`, `/v1/whoami`, `/v1/admission-keys`."""
    router = APIRouter(tags=["service"])

    @router.get("/healthz")
    def healthz() -> Response:
        """The process answers."""
        return reply({"status": "ok"})

    @router.get("/readyz")
    def readyz() -> Response:
        """Database, blobs and the place for uploads answer, too; 503 otherwise."""
        context.services.db.check_schema()
        context.blobs.check()
        context.uploads.check()
        return reply({"status": "ready"})

    @router.get("/metrics")
    def metrics() -> Response:
        """Prometheus text."""
        return Response(context.observer.metrics(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/whoami")
    def whoami(caller: CurrentCaller) -> Response:
        """What the token in use is good for."""
        return reply(
            {
                "tenant": caller.tenant,
                "kind": caller.kind,
                "scopes": sorted(caller.scopes),
                "adapters": list(caller.adapters),
                "expires_at": caller.expires_at.isoformat(),
            }
        )

    @router.get("/v1/admission-keys")
    def admission_keys(caller: CurrentCaller) -> Response:
        """The public keys that this registry's statements are signed with."""
        items = [{"key_id": key.key_id, "public_key_pem": key.pem} for key in context.admission_keys]
        return reply({"items": items, "next": None})

    return router
