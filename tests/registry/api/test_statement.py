"""The admission statement says what was admitted, and nothing else can be read out of it."""

from __future__ import annotations

from adapterd.loader.identity import SIGNATURE_FILE, BasePin, sha256_hex
from adapterd.loader.trust.admission import open_statement
from adapterd.loader.trust.keys import PublicKey
from fakes.clock import FakeClock
from fakes.registry_world import WEIGHTS, Package, World


def test_the_statement_of_a_version(world: World, package: Package, clock: FakeClock) -> None:
    signed = package.signed(world.acme.key)
    world.acme.finalize(world.acme.send(signed))
    (published,) = world.acme.http.get("/v1/admission-keys").json()["items"]
    key = PublicKey.from_pem(published["public_key_pem"])
    assert key.key_id == published["key_id"]
    envelope = world.acme.http.get(world.acme.version_url("finance", 1, "/admission")).content
    statement = open_statement(envelope, [key])
    assert (statement.tenant, statement.adapter, statement.version_number) == ("acme", "finance", 1)
    assert statement.base == world.base.pin
    assert statement.version_digest == package.digest
    assert statement.files == tuple(sorted(package.entries))
    assert statement.chunks == (sha256_hex(package.files[WEIGHTS]),)
    assert statement.publisher == world.acme.key.public.key_id
    assert statement.signature_sha256 == sha256_hex(signed.files[SIGNATURE_FILE])
    assert statement.issued_at == clock.now.replace(microsecond=0)
    policy = world.context.services.tenants.policy("acme")
    assert (statement.policy_id, statement.limits_id) == (policy.policy_id, policy.limits_id)
    assert statement.allowed == ()


def test_every_version_has_its_own(world: World, package: Package) -> None:
    world.acme.publish(package)
    other = package.changed({"README.md": b"second"})
    world.acme.publish(other)
    seen = {}
    for number in (1, 2):
        envelope = world.acme.http.get(world.acme.version_url("finance", number, "/admission")).content
        seen[number] = open_statement(envelope, world.context.admission_keys)
    assert {n: (s.version_number, s.version_digest) for n, s in seen.items()} == {
        1: (1, package.digest),
        2: (2, other.digest),
    }
    assert isinstance(seen[1].base, BasePin)
