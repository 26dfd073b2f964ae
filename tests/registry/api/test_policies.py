"""What a tenant's policy lets pass, and that the statement says so."""

from __future__ import annotations

from pathlib import Path

from adapterd.loader.trust.admission import AdmissionStatement, open_statement
from fakes.registry_world import Package, World, make_package


def test_unsigned(world: World, package: Package) -> None:
    world.acme.http.put(world.acme.url("/policy"), json={"require_signature": False})
    version = world.acme.finalize(world.acme.send(package)).json()["version"]
    assert (version["publisher"], version["signature"]) == ("none", None)
    statement = statement_of(world)
    assert (statement.publisher, statement.signature_sha256) == ("none", None)
    answer = world.acme.http.get(world.acme.version_url("finance", 1, "/signature"))
    assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")


def test_allowed_codes(world: World, tmp_path: Path) -> None:
    zero = make_package(tmp_path / "zero", scale=0.0)
    world.acme.http.put(world.acme.url("/policy"), json={"allow": ["ZERO_DELTA"]})
    version = world.acme.publish(zero, allow=["ZERO_DELTA"])
    assert ("ZERO_DELTA", "warn") in {(w["code"], w["severity"]) for w in version["warnings"]}
    assert statement_of(world).allowed == ("ZERO_DELTA",)
    # Allowed by the policy is not yet allowed by the uploader.
    answer = world.acme.finalize(world.acme.send(zero.signed(world.acme.key), adapter="other"))
    assert answer.json()["code"] == "ZERO_DELTA"


def test_refused_codes(world: World, tmp_path: Path) -> None:
    """What is a warning elsewhere is a refusal in a tenant that says so."""
    suspect = make_package(tmp_path / "suspect", alpha=1e6)
    version = world.acme.publish(suspect)
    assert ("SCALE_SUSPECT", "warn") in {(w["code"], w["severity"]) for w in version["warnings"]}
    assert world.acme.http.put(world.acme.url("/policy"), json={"refuse": ["SCALE_SUSPECT"]}).status_code == 200
    answer = world.acme.finalize(world.acme.send(suspect.signed(world.acme.key), adapter="other"))
    assert (answer.status_code, answer.json()["code"]) == (422, "SCALE_SUSPECT")
    both = world.acme.http.put(world.acme.url("/policy"), json={"allow": ["ZERO_DELTA"], "refuse": ["ZERO_DELTA"]})
    assert (both.json()["code"], both.json()["where"]) == ("SETTINGS_INVALID", "refuse")


def test_a_policy_that_changed_meanwhile_binds(world: World, tmp_path: Path) -> None:
    zero = make_package(tmp_path / "zero", scale=0.0).signed(world.acme.key)
    world.acme.http.put(world.acme.url("/policy"), json={"allow": ["ZERO_DELTA"]})
    upload_id = world.acme.send(zero, allow=["ZERO_DELTA"])
    world.acme.http.put(world.acme.url("/policy"), json={"allow": []})
    assert world.acme.finalize(upload_id).json()["code"] == "ZERO_DELTA"


def test_of_two_who_change_a_policy_they_have_seen_one_is_told(world: World) -> None:
    """Else the second would take back what the first did, and neither would know."""
    url = world.acme.url("/policy")
    seen = world.acme.http.get(url).headers["ETag"]
    first = world.acme.http.put(url, json={"refuse": ["SCALE_SUSPECT"]}, headers={"If-Match": seen})
    assert (first.status_code, first.headers["ETag"] != seen) == (200, True)
    second = world.acme.http.put(url, json={"require_signature": False}, headers={"If-Match": seen})
    assert (second.status_code, second.json()["code"]) == (412, "PRECONDITION_FAILED")
    now = world.acme.http.get(url)
    assert (now.json()["refuse"], now.json()["require_signature"]) == (["SCALE_SUSPECT"], True)
    assert now.headers["ETag"] == first.headers["ETag"]
    again = {**now.json(), "require_signature": False}
    del again["limits"]
    assert world.acme.http.put(url, json=again, headers={"If-Match": now.headers["ETag"]}).status_code == 200
    for odd in ("", '"', "*", f"W/{seen}", f"{seen}, {seen}"):
        answer = world.acme.http.put(url, json={}, headers={"If-Match": odd})
        assert (answer.status_code, answer.json()["code"]) == (422, "REQUEST_INVALID"), odd


def statement_of(world: World) -> AdmissionStatement:
    envelope = world.acme.http.get(world.acme.version_url("finance", 1, "/admission"))
    assert envelope.headers["content-type"] == "application/vnd.dsse+json"
    return open_statement(envelope.content, world.context.admission_keys)
