"""A publisher key as the registry shows it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One key of a tenant.

    Attributes:
        key_id: hex SHA-256 of the DER SubjectPublicKeyInfo.
        name: what the tenant calls it.
        public_key_pem: the key.
        created_at, revoked_at: UTC; `revoked_at` is None while the key is active.
    """

    key_id: str
    name: str
    public_key_pem: str
    created_at: datetime
    revoked_at: datetime | None

    @property
    def status(self) -> Literal["active", "revoked"]:
        return "active" if self.revoked_at is None else "revoked"
