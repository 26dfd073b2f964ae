"""The audit log's chain, and every way to break it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from adapterd.registry.audit.interfaces import GENESIS, AuditEntry, ChainReport
from adapterd.registry.audit.models import AuditEntryRow
from adapterd.registry.database import Database
from adapterd.registry.services import Services
from fakes.clock import FakeClock

FORGERY = (
    "INSERT INTO audit_entries SELECT 'acme', 4, at, actor, action, target, detail, prev, digest "
    "FROM audit_entries WHERE tenant = 'other'"
)


def append(services: Services, tenant: str | None = "acme", target: str = "x") -> AuditEntry:
    with services.db.write() as session:
        return services.audit.append(
            session, tenant=tenant, actor="me", action="thing.do", target=target, detail={"n": 1.5, "s": "ä"}
        )


def tamper(db: Database, *statements: str) -> None:
    """What the owner of the database can do: put the triggers out of action, then change history."""
    with db.connection() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL session_replication_role = replica"))
        else:
            for change in ("update", "delete"):
                connection.execute(text(f"DROP TRIGGER audit_entries_no_{change}"))
        for statement in statements:
            connection.execute(text(statement))


def test_entries_follow_each_other(services: Services, clock: FakeClock) -> None:
    first, second = append(services), append(services)
    assert (first.seq, first.prev, first.at) == (1, GENESIS, clock())
    assert (second.seq, second.prev) == (2, first.digest)
    assert services.audit.list("acme") == (first, second)
    assert services.audit.list("acme", after=1) == (second,)
    assert services.audit.list("acme", limit=1) == (first,)
    assert services.audit.verify("acme") == ChainReport(2, second.digest)


def test_each_tenant_has_its_chain(services: Services) -> None:
    append(services), append(services, "other")
    operators = append(services, None)
    assert (operators.seq, operators.prev) == (1, GENESIS)
    assert services.audit.verify(None).entries == services.audit.verify("other").entries == 1
    assert services.audit.verify("nobody") == ChainReport(0, GENESIS)


def test_a_rolled_back_action_leaves_no_entry(services: Services) -> None:
    append(services)
    with pytest.raises(LookupError), services.db.write() as session:
        services.audit.append(session, tenant="acme", actor="me", action="thing.do", target="x")
        raise LookupError
    assert append(services).seq == 2
    assert services.audit.verify("acme").ok


def test_many_writers_make_one_chain(services: Services) -> None:
    with ThreadPoolExecutor(4) as pool:
        sequence = sorted(done.result().seq for done in [pool.submit(append, services) for _ in range(12)])
    assert sequence == list(range(1, 13))
    assert services.audit.verify("acme").entries == 12


def test_several_entries_in_one_transaction(services: Services) -> None:
    with services.db.write() as session:
        for n in range(3):
            services.audit.append(session, tenant="acme", actor="me", action="thing.do", target=str(n))
    assert services.audit.verify("acme").entries == 3


@pytest.mark.parametrize(
    ("statements", "broken_at", "reason"),
    [
        (["UPDATE audit_entries SET actor = 'nobody' WHERE seq = 2"], 2, "changed"),
        (["UPDATE audit_entries SET detail = '{}' WHERE seq = 2"], 2, "changed"),
        (["UPDATE audit_entries SET at = '2020-01-01 00:00:00.000000' WHERE seq = 1"], 1, "changed"),
        (["DELETE FROM audit_entries WHERE seq = 2"], 2, "missing"),
        (["DELETE FROM audit_entries WHERE seq = 1"], 1, "missing"),
        (["DELETE FROM audit_entries WHERE seq = 3"], 3, "ends after 2"),
        (["DELETE FROM audit_entries"], 1, "ends after 0"),
        (["DELETE FROM audit_chains"], 4, "ends after 3"),
        (["UPDATE audit_entries SET prev = digest WHERE seq = 2"], 2, "does not follow"),
        (["UPDATE audit_entries SET seq = seq - 4"], 1, "missing"),
        (
            [
                "DELETE FROM audit_entries WHERE seq = 2",
                "UPDATE audit_entries SET seq = 2 WHERE seq = 3",
                "UPDATE audit_chains SET entries = 2",
            ],
            2,
            "does not follow",
        ),
        (
            [
                FORGERY,
            ],
            4,
            "does not follow",
        ),
    ],
)  # fmt: skip
def test_tampering_is_found(statements: list[str], broken_at: int, reason: str, services: Services) -> None:
    for _ in range(3):
        append(services)
    append(services, "other")
    tamper(services.db, *(s.replace("WHERE seq", "WHERE tenant = 'acme' AND seq") for s in statements))
    report = services.audit.verify("acme")
    assert (report.ok, report.broken_at) == (False, broken_at)
    assert reason in report.reason
    assert report.entries == broken_at - 1


def test_a_long_chain_is_walked_to_its_end(services: Services) -> None:
    with services.db.write() as session:
        for n in range(1010):
            last = services.audit.append(session, tenant="acme", actor="me", action="thing.do", target=str(n))
    assert services.audit.verify("acme") == ChainReport(1010, last.digest)
    tamper(services.db, "UPDATE audit_entries SET target = 'x' WHERE seq = 1005")
    assert services.audit.verify("acme").broken_at == 1005


def test_rows_hold_what_was_hashed(services: Services) -> None:
    entry = append(services)
    with services.db.read() as session:
        row = session.get_one(AuditEntryRow, ("acme", 1))
        assert (row.digest, row.detail) == (entry.digest, {"n": 1.5, "s": "ä"})
