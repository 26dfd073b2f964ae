"""Issuing, recognising and revoking."""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta

import pytest
from sqlalchemy import event, select

from adapterd.loader.errors import AdapterdError, Code, Failed, NotFound, Unauthenticated
from adapterd.registry.services import Services, build_services
from adapterd.registry.tokens.format import checksum, new_token
from adapterd.registry.tokens.interfaces import Scope
from adapterd.registry.tokens.models import TokenRow
from adapterd.registry.tokens.service import TokenService
from fakes.clock import FakeClock

SECRET = bytes(range(32))


@pytest.fixture
def tokens(services: Services) -> TokenService:
    services.tenants.create("acme", actor="op")
    services.tenants.create("other", actor="op")
    return services.tokens


def issue(tokens: TokenService, tenant: str | None = "acme", days: int = 30) -> str:
    scopes = [Scope.ADAPTERS_READ] if tenant else [Scope.OPERATOR]
    return tokens.issue(tenant, kind="s", scopes=scopes, expires_in_days=days, actor="op")[1]


def failure(tokens: TokenService, text: str) -> AdapterdError:
    with pytest.raises(Unauthenticated) as caught:
        tokens.authenticate(text)
    return caught.value


def test_a_token_is_recognised(tokens: TokenService, clock: FakeClock) -> None:
    info, text = tokens.issue(
        "acme",
        kind="w",
        scopes=["adapters:read", "audit:read"],
        expires_in_days=7,
        adapters=["fin*"],
        actor="op",
    )
    caller = tokens.authenticate(text)
    assert (caller.token_id, caller.tenant, caller.kind) == (info.id, "acme", "w")
    assert caller.scopes == {"adapters:read", "audit:read"}
    assert caller.adapters == ("fin*",)
    assert caller.expires_at == info.expires_at == clock() + timedelta(days=7)


def test_only_a_mac_is_stored(tokens: TokenService, services: Services) -> None:
    text = issue(tokens)
    with services.db.read() as session:
        row = session.scalars(select(TokenRow)).one()
    assert row.mac == hmac.new(SECRET, text.encode(), hashlib.sha256).hexdigest()
    stored = " ".join(str(value) for value in vars(row).values())
    assert text[15:58] not in stored


def test_what_is_no_token_never_reaches_the_database(tokens: TokenService, services: Services) -> None:
    text = issue(tokens)
    typo = text[:30] + ("a" if text[30] != "a" else "b") + text[31:]
    seen: list[str] = []
    engine = services.db._engine
    event.listen(engine, "before_cursor_execute", lambda *a: seen.append(a[2]))
    for wrong in ("", "x", typo):
        assert failure(tokens, wrong).code is Code.UNAUTHENTICATED
    assert seen == []
    tokens.authenticate(text)
    assert len([statement for statement in seen if "tokens" in statement]) == 1


def test_unknown_wrong_and_revoked_answer_alike(tokens: TokenService) -> None:
    text = issue(tokens)
    body = text[:15] + new_token("s").text[15:58]
    revoked = issue(tokens)
    tokens.revoke("acme", revoked[5:15], actor="op")
    problems = {failure(tokens, wrong).problem for wrong in (new_token("s").text, body + checksum(body), revoked)}
    assert len(problems) == 1


def test_the_kind_is_covered_by_the_mac(tokens: TokenService) -> None:
    body = "adru" + issue(tokens)[4:58]
    assert failure(tokens, body + checksum(body)).code is Code.UNAUTHENTICATED


def test_another_secret_knows_no_token(tokens: TokenService, services: Services, clock: FakeClock) -> None:
    text = issue(tokens)
    assert failure(build_services(services.db, bytes(32), clock).tokens, text).code is Code.UNAUTHENTICATED


def test_expiry(tokens: TokenService, clock: FakeClock) -> None:
    text = issue(tokens, days=1)
    clock.advance(hours=23, minutes=59, seconds=59)
    tokens.authenticate(text)
    clock.advance(seconds=1)
    assert failure(tokens, text).code is Code.TOKEN_EXPIRED
    body = text[:15] + new_token("s").text[15:58]
    assert failure(tokens, body + checksum(body)).code is Code.UNAUTHENTICATED  # who lacks the secret learns nothing
    tokens.revoke("acme", text[5:15], actor="op")
    assert failure(tokens, text).code is Code.UNAUTHENTICATED


def test_lists_and_revocation_stay_inside_the_tenant(tokens: TokenService) -> None:
    mine = [issue(tokens)[5:15] for _ in range(3)]
    theirs, operators = issue(tokens, "other")[5:15], issue(tokens, None)[5:15]
    assert [info.id for info in tokens.list("acme")] == sorted(mine)
    assert [info.id for info in tokens.list("acme", after=sorted(mine)[0], limit=1)] == [sorted(mine)[1]]
    assert [(info.id, info.tenant) for info in tokens.list(None)] == [(operators, None)]
    refusals = []
    for token_id in (theirs, operators, "0123456789"):
        with pytest.raises(NotFound) as caught:
            tokens.revoke("acme", token_id, actor="op")
        refusals.append(caught.value.problem.message)
    assert len(set(refusals)) == 1
    assert tokens.list("other")[0].revoked_at is None


def test_revoking_twice_keeps_the_first_time(tokens: TokenService, services: Services, clock: FakeClock) -> None:
    token_id = issue(tokens)[5:15]
    tokens.revoke("acme", token_id, actor="op")
    first = tokens.list("acme")[0].revoked_at
    clock.advance(days=1)
    tokens.revoke("acme", token_id, actor="op")
    assert tokens.list("acme")[0].revoked_at == first == clock() - timedelta(days=1)
    actions = [entry.action for entry in services.audit.list("acme")]
    assert actions == ["tenant.create", "token.issue", "token.revoke"]


@pytest.mark.parametrize(
    ("tenant", "changed", "where"),
    [
        ("acme", {"kind": "x"}, "kind"),
        ("acme", {"scopes": []}, "scopes"),
        ("acme", {"scopes": ["root"]}, "scopes"),
        ("acme", {"scopes": ["operator"]}, "scopes"),
        ("acme", {"expires_in_days": 0}, "expires_in_days"),
        ("acme", {"expires_in_days": 367}, "expires_in_days"),
        ("acme", {"adapters": []}, "adapters"),
        ("acme", {"adapters": ["[a-z]"]}, "adapters"),
        (None, {"adapters": ["../x"]}, "adapters"),
    ],
)
def test_tokens_that_cannot_be(
    tenant: str | None, changed: dict[str, object], where: str, tokens: TokenService
) -> None:
    given = {"kind": "u", "scopes": ["adapters:read"], "expires_in_days": 1, "actor": "op", **changed}
    with pytest.raises(Failed) as caught:
        tokens.issue(tenant, **given)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.problem.where) == (Code.REQUEST_INVALID, where)
    assert tokens.list(tenant) == ()


def test_no_token_for_an_unknown_tenant(tokens: TokenService) -> None:
    with pytest.raises(NotFound):
        issue(tokens, "nobody")


def test_a_short_secret_is_misuse(services: Services, clock: FakeClock) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        build_services(services.db, b"short", clock)
