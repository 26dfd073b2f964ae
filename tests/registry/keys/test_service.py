"""Publisher keys."""

from __future__ import annotations

from datetime import timedelta

import pytest

from adapterd.loader.errors import Code, Conflict, Failed, NotFound, Untrusted
from adapterd.loader.trust.keys import Algorithm, generate_admission_key, generate_publisher_key
from adapterd.registry.services import Services
from fakes.clock import FakeClock


@pytest.fixture
def tenants(services: Services) -> Services:
    services.tenants.create("acme", actor="op")
    services.tenants.create("other", actor="op")
    return services


def test_add_list_revoke(tenants: Services, clock: FakeClock) -> None:
    keys = tenants.keys
    first, second = (generate_publisher_key(a).public for a in (Algorithm.P256, Algorithm.P384))
    info = keys.add("acme", "ci", first.pem, actor="op")
    assert (info.key_id, info.name, info.status, info.created_at) == (first.key_id, "ci", "active", clock())
    keys.add("acme", "laptop", second.pem, actor="op")
    assert [key.key_id for key in keys.list("acme")] == sorted([first.key_id, second.key_id])
    assert len(keys.list("acme", after=keys.list("acme")[0].key_id)) == 1
    assert set(keys.active("acme")) == {first, second}

    clock.advance(days=1)
    assert keys.revoke("acme", first.key_id, actor="op").status == "revoked"
    clock.advance(days=1)
    assert keys.revoke("acme", first.key_id, actor="op").revoked_at == clock() - timedelta(days=1)
    assert keys.active("acme") == (second,)
    assert keys.revoked("acme") == (first,)
    actions = [entry.action for entry in tenants.audit.list("acme")]
    assert actions == ["tenant.create", "key.add", "key.add", "key.revoke"]


def test_a_key_or_name_is_taken_for_ever(tenants: Services) -> None:
    key = generate_publisher_key().public
    tenants.keys.add("acme", "ci", key.pem, actor="op")
    tenants.keys.revoke("acme", key.key_id, actor="op")
    for name, pem in (("new", key.pem), ("ci", generate_publisher_key().public.pem)):
        with pytest.raises(Conflict) as caught:
            tenants.keys.add("acme", name, pem, actor="op")
        assert caught.value.code is Code.ALREADY_EXISTS
    assert tenants.keys.active("acme") == ()


def test_tenants_do_not_see_each_other(tenants: Services) -> None:
    key = generate_publisher_key().public
    tenants.keys.add("acme", "ci", key.pem, actor="op")
    tenants.keys.add("other", "ci", key.pem, actor="op")
    tenants.keys.revoke("other", key.key_id, actor="op")
    assert tenants.keys.active("acme") == (key,)
    stranger = generate_publisher_key().public
    tenants.keys.add("other", "theirs", stranger.pem, actor="op")
    answers = []
    for key_id in (stranger.key_id, "0" * 64):
        with pytest.raises(NotFound) as caught:
            tenants.keys.revoke("acme", key_id, actor="op")
        answers.append(caught.value.problem.message)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "pem", ["", "x", generate_publisher_key().to_pem().decode(), generate_admission_key().public.pem]
)
def test_what_is_no_publisher_key(pem: str, tenants: Services) -> None:
    with pytest.raises(Untrusted) as caught:
        tenants.keys.add("acme", "ci", pem, actor="op")
    assert caught.value.code is Code.KEY_UNSUPPORTED
    assert tenants.keys.list("acme") == ()


def test_a_bad_name_and_an_unknown_tenant(tenants: Services) -> None:
    pem = generate_publisher_key().public.pem
    with pytest.raises(Failed):
        tenants.keys.add("acme", "../ci", pem, actor="op")
    with pytest.raises(NotFound):
        tenants.keys.add("nobody", "ci", pem, actor="op")
