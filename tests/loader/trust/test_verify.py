"""The trust core, step by step: one test a rule, and one a way to be out of order."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from adapterd.loader.errors import AdapterdError, Code, Refused, Untrusted
from adapterd.loader.identity import FileEntry
from adapterd.loader.trust import oms
from adapterd.loader.trust.admission import issue
from adapterd.loader.trust.keys import generate_admission_key, generate_publisher_key
from adapterd.loader.trust.policy import TrustStore
from adapterd.loader.trust.seen import Seen
from adapterd.loader.trust.verify import TrustedVersion, Wanted, verify_version

from .conftest import NOW, PIN, Signed


def refusal(signed: Signed, **over: Any) -> AdapterdError:
    """The same whether statement and signature, as they should be, were seen before or not."""
    given: dict[str, Any] = {
        "wanted": signed.wanted,
        "statement": signed.envelope(),
        "signature": signed.bundle,
        "trust": signed.trust(),
        "now": NOW,
    }
    with pytest.raises(AdapterdError) as caught:
        verify_version(**(given | over))
    given |= over
    again = TrustedVersion(given["wanted"], given["trust"], given["now"], seen_before(signed))
    with pytest.raises(AdapterdError) as caught_again:
        again.update_statement(given["statement"])
        again.update_signature(given["signature"])
    assert caught_again.value.problems == caught.value.problems
    return caught.value


def seen_before(signed: Signed) -> Seen:
    seen = Seen()
    checking = TrustedVersion(signed.wanted, signed.trust(), NOW, seen)
    checking.update_statement(signed.envelope())
    checking.update_signature(signed.bundle)
    return seen


def test_everything_holds(signed: Signed) -> None:
    checking = TrustedVersion(signed.wanted, signed.trust(), NOW)
    assert checking.update_statement(signed.envelope()) == signed.statement
    checked = checking.update_signature(signed.bundle)
    assert checked.admission_key_id == signed.registry.public.key_id
    assert checked.signature is not None
    assert checked.signature.key_id == signed.publisher.public.key_id
    checking.update_files(signed.files, signed.statement.chunks)
    assert not checking.complete
    checking.update_manifest("b" * 64)
    assert checking.complete


def test_what_was_seen_is_not_opened_anew_and_means_the_same(signed: Signed) -> None:
    seen, found = seen_before(signed), []
    for _ in range(2):
        checking = TrustedVersion(signed.wanted, signed.trust(), NOW, seen)
        checking.update_statement(signed.envelope())
        found.append(checking.update_signature(signed.bundle))
    assert found[0] == found[1] == verify_version(signed.wanted, signed.envelope(), signed.bundle, signed.trust(), NOW)
    assert found[0].statement is found[1].statement
    assert found[0].signature is found[1].signature


def test_a_registry_or_a_publisher_that_is_listed_no_more(signed: Signed) -> None:
    other = TrustStore()
    other.add_admission_key(generate_admission_key().public)
    assert refusal(signed, trust=other).code is Code.KEY_UNKNOWN
    other.add_admission_key(signed.registry.public)
    other.add_publisher_key(signed.statement.tenant, generate_publisher_key().public)
    assert refusal(signed, trust=other).code is Code.KEY_UNKNOWN


def test_what_was_seen_counts_for_no_other_bytes(signed: Signed) -> None:
    seen = seen_before(signed)
    checking = TrustedVersion(signed.wanted, signed.trust(), NOW, seen)
    with pytest.raises(Untrusted):
        checking.update_statement(signed.envelope().replace(b'"sig": "', b'"sig": "A', 1))
    checking.update_statement(signed.envelope())
    with pytest.raises(Untrusted):
        checking.update_signature(signed.bundle[:-9] + b"A" + signed.bundle[-8:])


# --- what was asked


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"tenant": "globex"}, "tenant"),
        ({"adapter": "code"}, "adapter"),
        ({"base": replace(PIN, id="other/base")}, "base id"),
        ({"base": replace(PIN, revision="8" * 40)}, "base revision"),
        ({"base": replace(PIN, module_table_digest="c" * 64)}, "base module table"),
        ({"version_digest": "d" * 64}, "version digest"),
        ({"version_number": 4}, "version number"),
    ],
)
def test_a_statement_about_something_else(signed: Signed, change: dict[str, Any], where: str) -> None:
    found = refusal(signed, wanted=replace(signed.wanted, **change))
    assert found.code is Code.STATEMENT_MISMATCH
    assert found.problem.where == where


def test_nobody_need_name_the_number(signed: Signed) -> None:
    wanted = Wanted("acme", "finance", PIN, signed.statement.version_digest)
    checked = verify_version(wanted, signed.envelope(), signed.bundle, signed.trust(), NOW)
    assert checked.statement.version_number == 3


# --- who says so


def test_without_an_admission_key_nothing_is_trusted(signed: Signed) -> None:
    assert refusal(signed, trust=TrustStore()).code is Code.TRUST_NOT_CONFIGURED


def test_a_statement_by_a_stranger(signed: Signed) -> None:
    assert refusal(signed, statement=issue(signed.statement, generate_admission_key())).code is Code.KEY_UNKNOWN


def test_a_statement_by_a_revoked_registry(signed: Signed) -> None:
    trust = signed.trust()
    trust.revoke_key(signed.registry.public.key_id)
    found = refusal(signed, trust=trust)
    assert found.code is Code.KEY_REVOKED
    assert found.problem.where == "admission statement"


def test_a_package_by_a_stranger(signed: Signed) -> None:
    bundle = oms.sign(signed.files, generate_publisher_key(), name="finance")
    assert refusal(signed, signature=bundle).code is Code.KEY_UNKNOWN


def test_a_package_by_a_revoked_publisher(signed: Signed) -> None:
    trust = signed.trust()
    trust.revoke_key(signed.publisher.public.key_id)
    assert refusal(signed, trust=trust).code is Code.KEY_REVOKED


def test_a_publisher_counts_in_its_own_tenant_only(signed: Signed) -> None:
    trust = TrustStore()
    trust.add_admission_key(signed.registry.public)
    trust.add_publisher_key("globex", signed.publisher.public)
    assert refusal(signed, trust=trust).code is Code.KEY_UNKNOWN


def test_a_stolen_admission_key_cannot_replace_the_files(signed: Signed) -> None:
    """I1: the registry signs anything the thief wants; the publisher's key is still missing."""
    evil = replace(signed.files[2], sha256="e" * 64)
    files = (*signed.files[:2], evil)
    from adapterd.loader.identity import version_digest

    statement = replace(signed.statement, files=files, version_digest=version_digest(files))
    wanted = replace(signed.wanted, version_digest=statement.version_digest)
    stolen = issue(statement, signed.registry)
    assert refusal(signed, wanted=wanted, statement=stolen).code is Code.MANIFEST_NOT_EXACT
    unsigned = issue(replace(statement, oms_root_digest=None, signature_sha256=None, publisher="none"), signed.registry)
    assert refusal(signed, wanted=wanted, statement=unsigned, signature=None).code is Code.SIGNATURE_MISSING


@pytest.mark.parametrize(
    "change",
    [{"publisher": "1" * 64}, {"oms_root_digest": "1" * 64}, {"signature_sha256": "1" * 64}],
)
def test_statement_and_signature_must_agree(signed: Signed, change: dict[str, Any]) -> None:
    assert refusal(signed, statement=signed.envelope(**change)).code is Code.STATEMENT_MISMATCH


def test_a_re_signed_package_needs_a_new_statement(signed: Signed) -> None:
    again = oms.sign(signed.files, signed.publisher, name="finance, second printing")
    assert again != signed.bundle
    assert refusal(signed, signature=again).code is Code.STATEMENT_MISMATCH


def test_signing_the_same_files_again_changes_nothing(signed: Signed) -> None:
    """ECDSA is deterministic here (RFC 6979), so that an upload that is continued stays the same upload."""
    assert oms.sign(signed.files, signed.publisher, name="finance") == signed.bundle


# --- unsigned versions


def test_an_unsigned_version_where_a_signature_is_required(signed: Signed) -> None:
    assert refusal(signed, statement=signed.unsigned(), signature=None).code is Code.SIGNATURE_MISSING


def test_an_unsigned_version_where_the_tenant_lets_it_be(signed: Signed) -> None:
    trust = signed.trust()
    trust.require_publisher("acme", required=False)
    checked = verify_version(signed.wanted, signed.unsigned(), None, trust, NOW)
    assert checked.signature is None


def test_a_withheld_signature_is_not_an_unsigned_version(signed: Signed) -> None:
    trust = signed.trust()
    trust.require_publisher("acme", required=False)
    assert refusal(signed, signature=None, trust=trust).code is Code.SIGNATURE_MISSING


def test_a_signature_that_the_statement_does_not_know(signed: Signed) -> None:
    trust = signed.trust()
    trust.require_publisher("acme", required=False)
    assert refusal(signed, statement=signed.unsigned(), trust=trust).code is Code.STATEMENT_MISMATCH


def test_a_bad_signature_is_refused_even_where_none_is_required(signed: Signed) -> None:
    trust = signed.trust()
    trust.require_publisher("acme", required=False)
    stranger = oms.sign(signed.files, generate_publisher_key(), name="finance")
    assert refusal(signed, signature=stranger, trust=trust).code is Code.KEY_UNKNOWN


# --- time


def test_a_statement_from_the_future(signed: Signed) -> None:
    assert refusal(signed, now=NOW - timedelta(days=2)).code is Code.STATEMENT_INVALID
    verify_version(signed.wanted, signed.envelope(), signed.bundle, signed.trust(), NOW - timedelta(hours=1))


def test_a_clock_without_a_zone_is_misuse(signed: Signed) -> None:
    with pytest.raises(ValueError, match="time zone"):
        TrustedVersion(signed.wanted, signed.trust(), datetime(2026, 3, 1))


# --- files and manifest


def checked(signed: Signed) -> TrustedVersion:
    checking = TrustedVersion(signed.wanted, signed.trust(), NOW)
    checking.update_statement(signed.envelope())
    checking.update_signature(signed.bundle)
    return checking


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda f: f[1:], Code.MANIFEST_NOT_EXACT),
        (lambda f: (*f, FileEntry("extra.txt", "0" * 64, 1)), Code.MANIFEST_NOT_EXACT),
        (lambda f: (replace(f[0], size=99), *f[1:]), Code.HASH_MISMATCH),
        (lambda f: (replace(f[0], sha256="0" * 64), *f[1:]), Code.HASH_MISMATCH),
    ],
)
def test_other_files(signed: Signed, change: Any, code: Code) -> None:
    with pytest.raises((Refused, Untrusted)) as caught:
        checked(signed).update_files(change(signed.files), signed.statement.chunks)
    assert caught.value.code is code


@pytest.mark.parametrize("chunks", [(), ("0" * 64,), ("0" * 64, "0" * 64)])
def test_other_chunks(signed: Signed, chunks: tuple[str, ...]) -> None:
    with pytest.raises(Untrusted) as caught:
        checked(signed).update_files(signed.files, chunks)
    assert caught.value.code is Code.CHUNK_MISMATCH


def test_another_manifest(signed: Signed) -> None:
    checking = checked(signed)
    checking.files_were_marked()
    with pytest.raises(Untrusted) as caught:
        checking.update_manifest("c" * 64)
    assert caught.value.code is Code.STATEMENT_MISMATCH
    assert not checking.complete


# --- misuse


def test_steps_out_of_order_are_our_own_mistake(signed: Signed) -> None:
    fresh = TrustedVersion(signed.wanted, signed.trust(), NOW)
    for step in (
        lambda: fresh.update_signature(signed.bundle),
        lambda: fresh.update_files(signed.files, signed.statement.chunks),
        fresh.files_were_marked,
        lambda: fresh.update_manifest("b" * 64),
        lambda: fresh.checked,
    ):
        with pytest.raises(RuntimeError):
            step()
    fresh.update_statement(signed.envelope())
    with pytest.raises(RuntimeError):
        fresh.update_statement(signed.envelope())
    fresh.update_signature(signed.bundle)
    for step in (lambda: fresh.update_signature(None), lambda: fresh.update_manifest("b" * 64)):
        with pytest.raises(RuntimeError):
            step()
    fresh.files_were_marked()
    for step in (fresh.files_were_marked, lambda: fresh.update_files(signed.files, signed.statement.chunks)):
        with pytest.raises(RuntimeError):
            step()


def test_a_step_that_failed_leaves_nothing_trusted(signed: Signed) -> None:
    checking = TrustedVersion(signed.wanted, signed.trust(), NOW)
    with pytest.raises(Untrusted):
        checking.update_statement(issue(signed.statement, generate_admission_key()))
    with pytest.raises(RuntimeError):
        checking.update_signature(signed.bundle)
    checking.update_statement(signed.envelope())
    with pytest.raises(Untrusted):
        checking.update_signature(None)
    with pytest.raises(RuntimeError):
        _ = checking.checked
