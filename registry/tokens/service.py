"""Issuing, recognising and revoking tokens."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.registry.audit.interfaces import OPERATOR
from adapterd.registry.audit.service import AuditLog
from adapterd.registry.database import Clock, Database
from adapterd.registry.errors import missing
from adapterd.registry.tenants.service import TenantService
from adapterd.registry.tokens.format import new_token, parse_token
from adapterd.registry.tokens.interfaces import Caller, Kind, Scope, TokenInfo
from adapterd.registry.tokens.models import TokenRow

MAX_DAYS = 366  # a token outlives no yearly rotation
MIN_SECRET_BYTES = 32  # RFC 2104 §3: an HMAC key shorter than the hash's output weakens it
_PATTERN = re.compile(r"[a-z0-9*][a-z0-9._*-]{0,63}")
_NOBODY = "0" * 64


class TokenService:
    """Tokens of all tenants and of the operator.

    Args:
        secret: at least 32 random bytes that never stand in the database. Who steals the database
            cannot try tokens against it; who changes the secret ends all tokens.
    """

    def __init__(self, db: Database, secret: bytes, tenants: TenantService, audit: AuditLog, clock: Clock) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"the token secret must have at least {MIN_SECRET_BYTES} bytes")
        self._db = db
        self._secret = secret
        self._tenants = tenants
        self._audit = audit
        self._clock = clock

    def issue(
        self,
        tenant: str | None,
        *,
        kind: Kind,
        scopes: Iterable[str],
        expires_in_days: int,
        adapters: Iterable[str] = ("*",),
        actor: str,
        giver: Caller | None = None,
    ) -> tuple[TokenInfo, str]:
        """A new token and its text, which exists nowhere else afterwards. `tenant` None: the operator's.

        Args:
            giver: whose token asks for it, so that it gives no more than it has; None for who sits at the machine.

        Raises:
            Failed: REQUEST_INVALID for a kind, scope, pattern or number of days that cannot be, or that the
                giver does not have.
            NotFound: no such tenant.
        """
        row, text = self._new(tenant, kind, scopes, adapters, days=expires_in_days, actor=actor)
        if giver is not None:
            _check_given(giver, row)
        with self._db.write() as session:
            if tenant is not None:
                self._tenants.lock(session, tenant)
            return self._insert(session, row), text

    def issue_first_operator(self, *, expires_in_days: int, actor: str) -> str | None:
        """The text of an operator's token, or None when there is or was one; of two callers one gets it."""
        row, text = self._new(None, "u", [Scope.OPERATOR], ["*"], days=expires_in_days, actor=actor)
        with self._db.write() as session:
            self._audit.lock(session, None)
            if session.scalar(select(TokenRow.id).where(TokenRow.tenant == OPERATOR).limit(1)) is not None:
                return None
            self._insert(session, row)
            return text

    def authenticate(self, bearer: str) -> Caller:
        """Who holds this token.

        Raises:
            Unauthenticated: UNAUTHENTICATED when it is malformed, unknown, wrong or revoked (nobody is told
                which), TOKEN_EXPIRED only to the holder of a token that was good.
        """
        token = parse_token(bearer)
        if token is None:
            raise _unauthenticated()
        with self._db.read() as session:
            row = session.scalar(select(TokenRow).where(TokenRow.id == token.id))
        # An unknown id costs the same MAC and the same comparison as a wrong secret.
        known = row.mac if row is not None else _NOBODY
        matches = hmac.compare_digest(self._mac(token.text), known)
        if row is None or not matches or row.revoked_at is not None:
            raise _unauthenticated()
        if row.expires_at <= self._clock():
            raise error(
                Code.TOKEN_EXPIRED, "Authorization", f"the token expired at {row.expires_at.isoformat()}",
                "Ask an administrator for a new one.",
            )  # fmt: skip
        info = _info(row)
        return Caller(info.id, info.tenant, info.kind, info.scopes, info.adapters, info.expires_at)

    def list(self, tenant: str | None, *, after: str = "", limit: int = 100) -> tuple[TokenInfo, ...]:
        """At most `limit` tokens, expired and revoked ones too, whose ids follow `after`, by id."""
        query = select(TokenRow).where(TokenRow.tenant == (tenant or OPERATOR), TokenRow.id > after)
        with self._db.read() as session:
            return tuple(_info(row) for row in session.scalars(query.order_by(TokenRow.id).limit(limit)))

    def revoke(self, tenant: str | None, token_id: str, *, actor: str) -> None:
        """End a token now; twice is once. Raises NotFound."""
        with self._db.write() as session:
            row = session.get(TokenRow, (tenant or OPERATOR, token_id), with_for_update=True)
            if row is None:
                raise missing(token_id)
            if row.revoked_at is None:
                row.revoked_at = self._clock()
                self._audit.append(session, tenant=tenant, actor=actor, action="token.revoke", target=token_id)

    def _new(
        self,
        tenant: str | None,
        kind: str,
        scopes: Iterable[str],
        adapters: Iterable[str],
        *,
        days: int,
        actor: str,
    ) -> tuple[TokenRow, str]:
        if kind not in ("u", "s", "w"):
            raise _invalid("kind", "must be u(ser), s(ervice) or w(orker)")
        if not 1 <= days <= MAX_DAYS:
            raise _invalid("expires_in_days", f"must be 1 to {MAX_DAYS}")
        token, now = new_token(kind), self._clock()
        row = TokenRow(
            tenant=tenant or OPERATOR, id=token.id, kind=kind, mac=self._mac(token.text),
            scopes=list(_checked_scopes(tenant, scopes)), adapters=list(_checked_patterns(adapters)),
            created_at=now, created_by=actor, expires_at=now + timedelta(days=days), revoked_at=None,
        )  # fmt: skip
        return row, token.text

    def _insert(self, session: Session, row: TokenRow) -> TokenInfo:
        session.add(row)
        session.flush()
        info = _info(row)
        detail = {"scopes": row.scopes, "adapters": row.adapters, "expires_at": info.expires_at.isoformat()}
        self._audit.append(
            session,
            tenant=info.tenant,
            actor=info.created_by,
            action="token.issue",
            target=info.id,
            detail=detail,
        )
        return info

    def _mac(self, text: str) -> str:
        return hmac.new(self._secret, text.encode("ascii"), hashlib.sha256).hexdigest()


def _check_given(giver: Caller, row: TokenRow) -> None:
    """A token gives what it has, for no longer than it lasts; an operator's begins every tenant's, and gives all.

    Raises:
        Failed: REQUEST_INVALID.
    """
    if giver.is_operator:
        return
    hint = "A token gives only what it has; ask an operator, or somebody whose token has more."
    for scope in row.scopes:
        if scope not in giver.scopes:
            raise _invalid("scopes", f"your token does not have the scope {scope}", hint)
    for pattern in row.adapters:
        # The new pattern's own '*' is matched by nothing but a '*' here, so all that it covers is covered.
        if not giver.covers(pattern):
            raise _invalid("adapters", f"your token does not cover {pattern!r}", hint)
    if row.expires_at > giver.expires_at:
        raise _invalid("expires_in_days", f"your token itself ends at {giver.expires_at.isoformat()}", hint)


def _checked_scopes(tenant: str | None, scopes: Iterable[str]) -> tuple[str, ...]:
    wanted = tuple(sorted(set(scopes)))
    unknown = [scope for scope in wanted if scope not in set(Scope)]
    if unknown or not wanted:
        found = f"no scope {unknown[0]!r}" if unknown else "at least one scope is needed"
        raise _invalid("scopes", found, f"Scopes: {', '.join(Scope)}.")
    if tenant is not None and Scope.OPERATOR in wanted:
        raise _invalid("scopes", "the scope operator belongs to no tenant's token")
    return wanted


def _checked_patterns(adapters: Iterable[str]) -> tuple[str, ...]:
    patterns = tuple(sorted(set(adapters)))
    bad = [pattern for pattern in patterns if not _PATTERN.fullmatch(pattern)]
    if bad or not patterns:
        found = f"{bad[0][:80]!r} is no pattern of names" if bad else "at least one pattern is needed"
        raise _invalid("adapters", found, "Use a name, or a part of one with '*' for the rest.")
    return patterns


def _invalid(where: str, message: str, hint: str = "") -> AdapterdError:
    return error(Code.REQUEST_INVALID, where, message, hint)


def _unauthenticated() -> AdapterdError:
    return error(
        Code.UNAUTHENTICATED,
        "Authorization",
        "the token is not valid",
        "Give a current token as `Bearer adr…`.",
    )


def _info(row: TokenRow) -> TokenInfo:
    return TokenInfo(
        row.id, None if row.tenant == OPERATOR else row.tenant, row.kind, frozenset(row.scopes),
        tuple(row.adapters), row.created_at, row.created_by, row.expires_at, row.revoked_at,
    )  # fmt: skip
