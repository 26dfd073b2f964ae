"""What the rest of the registry knows of a tenant."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from adapterd.loader.errors import Code
from adapterd.loader.identity import canonical_json, sha256_hex
from adapterd.loader.limits import DEFAULT_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """A tenant as it is listed."""

    name: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What a tenant's uploads must keep to.

    Attributes:
        require_signature: whether an upload without a valid publisher signature is refused.
        allow: refusals that an uploader may turn into recorded warnings, within `loader.checks.ALLOWABLE`.
        refuse: warnings that are refusals in this tenant, such as SCALE_SUSPECT.
        limits: the caps.
    """

    require_signature: bool = True
    allow: frozenset[Code] = frozenset()
    refuse: frozenset[Code] = frozenset()
    limits: Limits = DEFAULT_LIMITS

    def as_json(self) -> dict[str, Any]:
        """The body of `GET /v1/tenants/{t}/policy`."""
        return {
            "require_signature": self.require_signature,
            "allow": sorted(code.value for code in self.allow),
            "refuse": sorted(code.value for code in self.refuse),
            "limits": self.limits.as_json(),
        }

    @property
    def policy_id(self) -> str:
        """SHA-256 (hex) of the RFC 8785 form: what an admission statement names as its policy."""
        return sha256_hex(canonical_json(self.as_json()))

    @property
    def limits_id(self) -> str:
        """SHA-256 (hex) of the RFC 8785 form of the limits alone."""
        return sha256_hex(canonical_json(self.limits.as_json()))
