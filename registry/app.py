"""The composition root of the server: settings in, an ASGI application out. Nothing is built at import."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import TextIO

from fastapi import FastAPI

from adapterd.loader.trust.keys import PrivateKey
from adapterd.registry import operations
from adapterd.registry.api import (
    adapters,
    aliases,
    base_models,
    health,
    keys,
    problems,
    resolve,
    tenants,
    tokens,
    uploads,
)
from adapterd.registry.api.auth import Authenticate
from adapterd.registry.api.context import Context
from adapterd.registry.api.lanes import InTurn, Lanes
from adapterd.registry.api.observe import Observe, Observer
from adapterd.registry.blobs.factory import open_blobs
from adapterd.registry.blobs.interfaces import BlobStore
from adapterd.registry.catalog.adapters import AdapterService
from adapterd.registry.catalog.aliases import AliasService
from adapterd.registry.catalog.resolve import Resolver
from adapterd.registry.catalog.versions import VersionService
from adapterd.registry.database import Clock, Database, utcnow
from adapterd.registry.services import Services, build_services
from adapterd.registry.settings import Settings
from adapterd.registry.sweeping import sweeping
from adapterd.registry.uploads.finalize import Admission
from adapterd.registry.uploads.interfaces import StagingQuota
from adapterd.registry.uploads.janitor import Janitor
from adapterd.registry.uploads.service import UploadService
from adapterd.registry.uploads.staging import StagingArea

_ROUTES = (health, tenants, tokens, keys, base_models, uploads, adapters, aliases, resolve)


def create_app(settings: Settings, *, clock: Clock = utcnow, log_to: TextIO | None = None) -> FastAPI:
    """The server for these settings. Everything that could stop it from serving is checked here.

    Args:
        log_to: where JSON log lines go; standard error if None.

    Raises:
        Failed: SETTINGS_INVALID (a secret is missing or broken), SCHEMA_OUTDATED; both say what to run.
        Unavailable: DATABASE_UNAVAILABLE.
    """
    services = build_services(Database(settings.effective_database_url), operations.load_token_secret(settings), clock)
    key = operations.load_admission_key(settings)
    services.db.check_schema()
    context = build_context(
        services,
        blobs=open_blobs(settings),
        staging=StagingArea(settings.uploads_dir),
        key=key,
        observer=Observer(log_to or sys.stderr),
        clock=clock,
        upload_lifetime=timedelta(hours=settings.upload_ttl_hours),
        upload_quota=StagingQuota(settings.max_open_uploads, settings.max_staged_bytes),
        lanes=Lanes(settings.max_checks),
    )
    context.janitor.sweep()
    return build_app(context)


def build_context(
    services: Services,
    *,
    blobs: BlobStore,
    staging: StagingArea,
    key: PrivateKey,
    observer: Observer,
    clock: Clock,
    upload_lifetime: timedelta,
    upload_quota: StagingQuota,
    lanes: Lanes,
) -> Context:
    """Wire uploads and catalog over the services; opens nothing."""
    db, audit, at_tenant = services.db, services.audit, services.tenants
    versions = VersionService(db, at_tenant, audit, clock)
    pointers = AliasService(db, at_tenant, audit, clock)
    janitor = Janitor(db, at_tenant, staging, blobs, clock)
    sessions = UploadService(db, at_tenant, staging, janitor, clock, upload_lifetime, upload_quota)
    admission = Admission(
        db=db,
        uploads=sessions,
        staging=staging,
        janitor=janitor,
        tenants=at_tenant,
        keys=services.keys,
        base_models=services.base_models,
        blobs=blobs,
        versions=versions,
        aliases=pointers,
        audit=audit,
        key=key,
        clock=clock,
        announcer=observer,
    )
    return Context(
        services=services,
        blobs=blobs,
        adapters=AdapterService(db),
        versions=versions,
        aliases=pointers,
        resolver=Resolver(db),
        uploads=sessions,
        admission=admission,
        janitor=janitor,
        admission_keys=(key.public,),
        observer=observer,
        lanes=lanes,
    )


def build_app(context: Context) -> FastAPI:
    """The ASGI application over a wired context; closes the database when it is shut down."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with sweeping(context.janitor.sweep, context.observer.not_swept):
            yield
        context.services.db.dispose()

    # The interactive documentation would load scripts from elsewhere; the description itself stays.
    app = FastAPI(
        title="adapterd", version=version("adapterd"), lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    routers = [module.routes(context) for module in _ROUTES]
    for router in routers:
        app.include_router(router)
    problems.install(app, routers)
    app.add_middleware(InTurn, lanes=context.lanes)
    app.add_middleware(Authenticate, tokens=context.services.tokens)
    app.add_middleware(Observe, observer=context.observer)
    return app
