"""What a caller may do, and that a refusal tells nothing."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from adapterd.loader.errors import NotFound
from adapterd.registry.errors import missing
from adapterd.registry.tokens.interfaces import Caller, Scope


def caller(tenant: str | None, *scopes: str, adapters: tuple[str, ...] = ("*",)) -> Caller:
    return Caller("id", tenant, "u", frozenset(scopes), adapters, datetime(2027, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("who", "tenant", "scope", "adapter", "allowed"),
    [
        (caller("acme", Scope.ADAPTERS_READ), "acme", "adapters:read", "finance", True),
        (caller("acme", Scope.ADAPTERS_READ), "acme", "adapters:upload", "finance", False),
        (caller("acme", Scope.ADAPTERS_READ), "other", "adapters:read", "finance", False),
        (caller("acme", Scope.ADAPTERS_READ), None, "adapters:read", None, False),
        (caller("acme", Scope.ADAPTERS_READ, adapters=("fin*",)), "acme", "adapters:read", "finance", True),
        (caller("acme", Scope.ADAPTERS_READ, adapters=("fin*",)), "acme", "adapters:read", "code", False),
        (
            caller("acme", Scope.ADAPTERS_READ, adapters=("fin", "code")),
            "acme",
            "adapters:read",
            "code",
            True,
        ),
        (caller("acme", Scope.ADAPTERS_READ, adapters=("fin*",)), "acme", "adapters:read", None, True),
        (caller("acme"), "acme", "operator", None, False),
        (caller(None, Scope.OPERATOR), None, "operator", None, True),
        (caller(None, Scope.OPERATOR), "acme", "tokens:admin", None, True),
        (caller(None, Scope.OPERATOR), "acme", "keys:admin", None, True),
        (caller(None, Scope.OPERATOR), "acme", "adapters:read", "finance", False),
        (caller(None, Scope.ADAPTERS_READ), "acme", "adapters:read", "finance", True),
        (caller(None, Scope.ADAPTERS_READ), None, "operator", None, False),
    ],
)
def test_allows(who: Caller, tenant: str | None, scope: str, adapter: str | None, allowed: bool) -> None:
    assert who.allows(tenant, scope, adapter) is allowed
    if allowed:
        who.require(tenant, scope, adapter)
    else:
        with pytest.raises(NotFound):
            who.require(tenant, scope, adapter)


def test_foreign_unscoped_and_missing_answer_alike() -> None:
    answers = []
    for who in (caller("acme"), caller("other", Scope.ADAPTERS_READ), caller(None)):
        with pytest.raises(NotFound) as caught:
            who.require("acme", Scope.ADAPTERS_READ, "finance")
        answers.append(caught.value.problem)
    assert set(answers) == {missing("acme/finance").problem}
