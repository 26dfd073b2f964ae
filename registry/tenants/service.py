"""Making tenants and keeping their policies."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import select
from sqlalchemy.orm import Session

from adapterd.loader.checks import ALLOWABLE
from adapterd.loader.errors import Code, error
from adapterd.loader.identity import check_name
from adapterd.loader.limits import Limits
from adapterd.registry.audit.service import AuditLog
from adapterd.registry.database import Clock, Database
from adapterd.registry.errors import missing
from adapterd.registry.tenants.interfaces import TenantInfo, TenantPolicy
from adapterd.registry.tenants.models import TenantRow


class TenantService:
    """Tenants. Callers have checked that the actor may do what they ask for."""

    def __init__(self, db: Database, audit: AuditLog, clock: Clock) -> None:
        self._db = db
        self._audit = audit
        self._clock = clock

    def create(self, name: str, *, actor: str) -> TenantInfo:
        """A new tenant with the default policy: signatures required, nothing allowed.

        Raises:
            Failed: REF_INVALID for a name outside the grammar.
            Conflict: ALREADY_EXISTS.
        """
        check_name("tenant", name)
        policy = TenantPolicy()
        with self._db.write() as session:
            if session.get(TenantRow, name) is not None:
                raise error(Code.ALREADY_EXISTS, name, "there is a tenant of this name")
            row = TenantRow(
                name=name,
                created_at=self._clock(),
                require_signature=policy.require_signature,
                allow=[],
                refuse=[],
                limits={},
            )
            session.add(row)
            session.flush()
            self._audit.append(session, tenant=name, actor=actor, action="tenant.create", target=name)
            return TenantInfo(row.name, row.created_at)

    def get(self, name: str) -> TenantInfo:
        """Raises NotFound."""
        with self._db.read() as session:
            row = session.get(TenantRow, name)
            if row is None:
                raise missing(name)
            return TenantInfo(row.name, row.created_at)

    def list(self, *, after: str = "", limit: int = 100) -> tuple[TenantInfo, ...]:
        """At most `limit` tenants whose names follow `after`, by name."""
        query = select(TenantRow).where(TenantRow.name > after).order_by(TenantRow.name).limit(limit)
        with self._db.read() as session:
            return tuple(TenantInfo(row.name, row.created_at) for row in session.scalars(query))

    def policy(self, name: str) -> TenantPolicy:
        """Raises NotFound."""
        with self._db.read() as session:
            row = session.get(TenantRow, name)
            if row is None:
                raise missing(name)
            return _policy(row)

    def set_policy(
        self,
        name: str,
        change: Callable[[TenantPolicy], TenantPolicy],
        *,
        actor: str,
        may_limit: bool = True,
        expected: str | None = None,
    ) -> TenantPolicy:
        """Replace the policy; it binds uploads that are finalized afterwards.

        Args:
            change: makes the new policy of the present one, which nobody changes meanwhile.
            may_limit: whether the actor may change the limits, which protect the registry from the tenant.
            expected: `policy_id` that the present one must have; None for any.

        Raises:
            Failed: SETTINGS_INVALID when it allows a code outside `ALLOWABLE`, or one that it refuses;
                REQUEST_INVALID for other limits from who may not change them; what `change` raises.
            Conflict: PRECONDITION_FAILED when another policy than the expected one holds.
            NotFound: no such tenant.
        """
        with self._db.write() as session:
            row = self.lock(session, name)
            present = _policy(row)
            if expected not in (None, present.policy_id):
                raise error(
                    Code.PRECONDITION_FAILED, "policy", "the policy has changed since it was looked at",
                    "Look at it again, then change it.",
                )  # fmt: skip
            policy = change(present)
            _check(policy)
            if not may_limit and policy.limits != present.limits:
                raise error(
                    Code.REQUEST_INVALID, "limits", "only an operator changes a tenant's limits",
                    "Leave `limits` out to keep them, or ask an operator.",
                )  # fmt: skip
            row.require_signature = policy.require_signature
            row.allow = sorted(code.value for code in policy.allow)
            row.refuse = sorted(code.value for code in policy.refuse)
            row.limits = _overrides(policy.limits)
            detail = {**policy.as_json(), "policy_id": policy.policy_id}
            self._audit.append(session, tenant=name, actor=actor, action="tenant.policy", target=name, detail=detail)
        return policy

    def lock(self, session: Session, name: str) -> TenantRow:
        """Hold the tenant until the transaction ends, so that its writers come one by one.

        What is read after this cannot change before the commit: "largest number plus one" is safe.
        Always the first lock of a transaction (the audit log's comes last), so nobody waits in a circle.

        Raises:
            NotFound: no such tenant.
        """
        row = session.scalar(select(TenantRow).where(TenantRow.name == name).with_for_update())
        if row is None:
            raise missing(name)
        return row


def _check(policy: TenantPolicy) -> None:
    """Raises Failed (SETTINGS_INVALID)."""
    forbidden = sorted(policy.allow - ALLOWABLE)
    if forbidden:
        raise error(
            Code.SETTINGS_INVALID, "allow", f"{forbidden[0]} cannot be allowed",
            f"Allowable: {', '.join(sorted(ALLOWABLE))}.",
        )  # fmt: skip
    both = sorted(policy.allow & policy.refuse)
    if both:
        raise error(Code.SETTINGS_INVALID, "refuse", f"{both[0]} cannot be allowed and refused at once")


def _policy(row: TenantRow) -> TenantPolicy:
    return TenantPolicy(
        require_signature=row.require_signature,
        allow=frozenset(Code(c) for c in row.allow),
        refuse=frozenset(Code(c) for c in row.refuse),
        limits=Limits.from_json(row.limits),
    )


def _overrides(limits: Limits) -> dict[str, object]:
    """Only what differs from the defaults is stored, so that a policy follows a new default."""
    default = Limits().as_json()
    return {name: value for name, value in limits.as_json().items() if value != default[name]}
