"""The audit log's own types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from adapterd.loader.identity import canonical_json, sha256_hex

ENTRY_TYPE = "adapterd.audit/1"
GENESIS = "0" * 64
OPERATOR = "-operator"  # no tenant's name starts with a hyphen


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One thing that happened.

    Attributes:
        tenant: whose chain it stands in, or `OPERATOR`.
        seq: 1, 2, 3 … within the chain.
        at: when, UTC.
        actor: id of the token that asked for it, or the local command's name.
        action: `noun.verb`.
        target: what it was done to.
        detail: more, as JSON.
        prev: digest (hex) of the entry before, `GENESIS` for the first.
    """

    tenant: str
    seq: int
    at: datetime
    actor: str
    action: str
    target: str
    detail: Mapping[str, Any]
    prev: str

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the RFC 8785 form of all fields."""
        body = {
            "type": ENTRY_TYPE,
            "tenant": self.tenant,
            "seq": self.seq,
            "at": self.at.isoformat(timespec="microseconds"),
            "actor": self.actor,
            "action": self.action,
            "target": self.target,
            "detail": dict(self.detail),
            "prev": self.prev,
        }
        return sha256_hex(canonical_json(body))


@dataclass(frozen=True, slots=True)
class ChainReport:
    """The verdict on one chain.

    Attributes:
        entries: how many hold, from the first on.
        head: digest (hex) of the last one that holds.
        broken_at: `seq` of the first that does not, or None.
        reason: why it does not; empty when all hold.
    """

    entries: int
    head: str
    broken_at: int | None = None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.broken_at is None
