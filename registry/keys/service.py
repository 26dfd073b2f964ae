"""Adding, listing and revoking the keys that a tenant's publishers sign with."""

from __future__ import annotations

from sqlalchemy import select

from adapterd.loader.errors import Code, error
from adapterd.loader.identity import check_name
from adapterd.loader.trust.keys import PUBLISHER_ALGORITHMS, PublicKey
from adapterd.registry.audit.service import AuditLog
from adapterd.registry.database import Clock, Database
from adapterd.registry.errors import missing
from adapterd.registry.keys.interfaces import KeyInfo
from adapterd.registry.keys.models import KeyRow
from adapterd.registry.tenants.service import TenantService


class KeyService:
    """Publisher keys, by tenant."""

    def __init__(self, db: Database, tenants: TenantService, audit: AuditLog, clock: Clock) -> None:
        self._db = db
        self._tenants = tenants
        self._audit = audit
        self._clock = clock

    def add(self, tenant: str, name: str, public_key_pem: str, *, actor: str) -> KeyInfo:
        """Trust a key for this tenant's signatures.

        Raises:
            Failed: REF_INVALID for a name outside the grammar.
            Untrusted: KEY_UNSUPPORTED for anything but a P-256, P-384 or P-521 public key.
            NotFound: no such tenant.
            Conflict: ALREADY_EXISTS for a key or a name that the tenant has or had.
        """
        check_name("key name", name)
        key = _publisher_key(public_key_pem)
        with self._db.write() as session:
            self._tenants.lock(session, tenant)
            if session.get(KeyRow, (tenant, key.key_id)) is not None:
                raise error(Code.ALREADY_EXISTS, key.key_id, "the tenant has this key, or had and revoked it")
            taken = select(KeyRow.key_id).where(KeyRow.tenant == tenant, KeyRow.name == name)
            if session.scalar(taken) is not None:
                raise error(Code.ALREADY_EXISTS, name, "the tenant has, or had, a key of this name")
            row = KeyRow(
                tenant=tenant, key_id=key.key_id, name=name, public_key_pem=key.pem,
                created_at=self._clock(), revoked_at=None,
            )  # fmt: skip
            session.add(row)
            session.flush()
            self._audit.append(
                session,
                tenant=tenant,
                actor=actor,
                action="key.add",
                target=key.key_id,
                detail={"name": name},
            )
            return _info(row)

    def list(self, tenant: str, *, after: str = "", limit: int = 100) -> tuple[KeyInfo, ...]:
        """At most `limit` keys, revoked ones too, whose ids follow `after`, by id."""
        query = select(KeyRow).where(KeyRow.tenant == tenant, KeyRow.key_id > after)
        with self._db.read() as session:
            return tuple(_info(row) for row in session.scalars(query.order_by(KeyRow.key_id).limit(limit)))

    def revoke(self, tenant: str, key_id: str, *, actor: str) -> KeyInfo:
        """Trust the key no more; revoking it twice keeps the first time. Raises NotFound."""
        with self._db.write() as session:
            self._tenants.lock(session, tenant)
            row = session.get(KeyRow, (tenant, key_id))
            if row is None:
                raise missing(key_id)
            if row.revoked_at is None:
                row.revoked_at = self._clock()
                self._audit.append(session, tenant=tenant, actor=actor, action="key.revoke", target=key_id)
            return _info(row)

    def active(self, tenant: str) -> tuple[PublicKey, ...]:
        """The keys that a signature may be made with now, by id."""
        return tuple(PublicKey.from_pem(pem) for pem in self._pems(tenant, revoked=False))

    def revoked(self, tenant: str) -> tuple[PublicKey, ...]:
        """The keys that it may no longer be made with, to tell KEY_REVOKED from KEY_UNKNOWN."""
        return tuple(PublicKey.from_pem(pem) for pem in self._pems(tenant, revoked=True))

    def _pems(self, tenant: str, *, revoked: bool) -> tuple[str, ...]:
        state = KeyRow.revoked_at.is_not(None) if revoked else KeyRow.revoked_at.is_(None)
        query = select(KeyRow.public_key_pem).where(KeyRow.tenant == tenant, state).order_by(KeyRow.key_id)
        with self._db.read() as session:
            return tuple(session.scalars(query))


def _publisher_key(pem: str) -> PublicKey:
    key = PublicKey.from_pem(pem)
    if key.algorithm not in PUBLISHER_ALGORITHMS:
        raise error(
            Code.KEY_UNSUPPORTED, "public_key_pem", f"publishers do not sign with {key.algorithm}",
            "Use ECDSA on P-256, P-384 or P-521, as `adapterctl keygen` does.",
        )  # fmt: skip
    return key


def _info(row: KeyRow) -> KeyInfo:
    return KeyInfo(row.key_id, row.name, row.public_key_pem, row.created_at, row.revoked_at)
