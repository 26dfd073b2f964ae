"""Who calls, and what the caller may do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Literal

from adapterd.registry.errors import missing

Kind = Literal["u", "s", "w"]  # user, service, worker


class Scope(StrEnum):
    """What a token may be good for (docs/surfaces.md)."""

    OPERATOR = "operator"
    ADAPTERS_READ = "adapters:read"
    ADAPTERS_UPLOAD = "adapters:upload"
    ALIASES_PROMOTE = "aliases:promote"
    KEYS_ADMIN = "keys:admin"
    TOKENS_ADMIN = "tokens:admin"
    AUDIT_READ = "audit:read"


# An operator administrates tenants; their adapters are none of an operator's business unless a scope says so.
_OPERATOR_IMPLIES = frozenset({Scope.KEYS_ADMIN, Scope.TOKENS_ADMIN, Scope.AUDIT_READ})


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller.

    Attributes:
        token_id: the public part of the token; the actor of audit entries.
        tenant: the tenant it belongs to, or None for the operator.
        kind: u(ser), s(ervice) or w(orker).
        scopes: what it may do.
        adapters: patterns of adapter names, `*` standing for any run of characters.
        expires_at: UTC.
    """

    token_id: str
    tenant: str | None
    kind: str
    scopes: frozenset[str]
    adapters: tuple[str, ...]
    expires_at: datetime

    def allows(self, tenant: str | None, scope: str, adapter: str | None = None) -> bool:
        """Whether `scope` is granted in `tenant` (None: outside of all), and for `adapter` if named."""
        if self.tenant is not None and self.tenant != tenant:
            return False
        return self._has(scope) and (adapter is None or self.covers(adapter))

    def covers(self, adapter: str) -> bool:
        """Whether an adapter's name is within the token's patterns; for lists, which leave the others out."""
        return any(fnmatchcase(adapter, pattern) for pattern in self.adapters)

    def require(self, tenant: str | None, scope: str, adapter: str | None = None) -> None:
        """Raise NotFound unless `allows`: the answer of an object that does not exist (I9)."""
        if not self.allows(tenant, scope, adapter):
            parts = [part for part in (tenant, adapter) if part is not None]
            raise missing("/".join(parts) or "request")

    @property
    def is_operator(self) -> bool:
        """Whether the scope `operator` is granted; it belongs to no tenant's token."""
        return self.tenant is None and Scope.OPERATOR in self.scopes

    def _has(self, scope: str) -> bool:
        if scope in self.scopes:
            return True
        return self.is_operator and scope in _OPERATOR_IMPLIES


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token as it is listed: everything but its secret."""

    id: str
    tenant: str | None
    kind: str
    scopes: frozenset[str]
    adapters: tuple[str, ...]
    created_at: datetime
    created_by: str
    expires_at: datetime
    revoked_at: datetime | None
