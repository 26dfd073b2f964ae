"""The services over one database, wired once for the server, the local commands and the tests."""

from __future__ import annotations

from dataclasses import dataclass

from adapterd.registry.audit.service import AuditLog
from adapterd.registry.base_models.service import BaseModelService
from adapterd.registry.database import Clock, Database, utcnow
from adapterd.registry.keys.service import KeyService
from adapterd.registry.tenants.service import TenantService
from adapterd.registry.tokens.service import TokenService


@dataclass(frozen=True, slots=True)
class Services:
    """What a request may need of the domains below uploads and catalog."""

    db: Database
    audit: AuditLog
    tenants: TenantService
    tokens: TokenService
    keys: KeyService
    base_models: BaseModelService


def build_services(db: Database, token_secret: bytes, clock: Clock = utcnow) -> Services:
    """Wire them; opens nothing."""
    audit = AuditLog(db, clock)
    tenants = TenantService(db, audit, clock)
    return Services(
        db=db,
        audit=audit,
        tenants=tenants,
        tokens=TokenService(db, token_secret, tenants, audit, clock),
        keys=KeyService(db, tenants, audit, clock),
        base_models=BaseModelService(db, audit, clock),
    )
