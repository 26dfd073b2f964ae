from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from securesystemslib.signer import CryptoSigner, Signature, SSlibKey

from adapterd.loader.errors import Code, Untrusted
from adapterd.loader.trust.keys import (
    Algorithm,
    PrivateKey,
    PublicKey,
    generate_admission_key,
    generate_publisher_key,
)

EVERY = [Algorithm.P256, Algorithm.P384, Algorithm.P521, Algorithm.ED25519]


def make(algorithm: Algorithm) -> PrivateKey:
    return generate_admission_key() if algorithm is Algorithm.ED25519 else generate_publisher_key(algorithm)


@pytest.mark.parametrize("algorithm", EVERY)
def test_keys_round_trip_through_pem(algorithm: Algorithm) -> None:
    key = make(algorithm)
    assert PrivateKey.from_pem(key.to_pem()).public == key.public
    assert PublicKey.from_pem(key.public.pem) == key.public
    assert key.public.algorithm is algorithm
    assert PublicKey.from_pem(key.public.pem.replace("\n", "\r\n")).key_id == key.public.key_id


@pytest.mark.parametrize("algorithm", EVERY)
def test_a_signature_holds_for_its_bytes_and_key_only(algorithm: Algorithm) -> None:
    key = make(algorithm)
    signature = key.sign(b"data")
    assert key.public.verifies(signature, b"data")
    assert not key.public.verifies(signature, b"Data")
    assert not key.public.verifies(signature[:-1], b"data")
    assert not key.public.verifies(b"", b"data")
    assert not make(algorithm).public.verifies(signature, b"data")


@pytest.mark.parametrize("algorithm", EVERY)
def test_securesystemslib_agrees_both_ways(algorithm: Algorithm) -> None:
    key = make(algorithm)
    private = serialization.load_pem_private_key(key.to_pem(), None)
    theirs = SSlibKey.from_crypto(private.public_key(), keyid=key.public.key_id)
    theirs.verify_signature(Signature(key.public.key_id, key.sign(b"data").hex()), b"data")
    signature = CryptoSigner(private, theirs).sign(b"data")
    assert key.public.verifies(bytes.fromhex(signature.signature), b"data")


def _pem(private: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"not a key",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        b"x" * 20_000,
        _pem(ec.generate_private_key(ec.SECP256K1())),
        _pem(rsa.generate_private_key(65537, 2048)),
        generate_publisher_key().to_pem(),
    ],
    ids=["empty", "text", "bad-der", "huge", "other-curve", "rsa", "private"],
)
def test_other_public_keys_are_refused(pem: bytes) -> None:
    with pytest.raises(Untrusted) as caught:
        PublicKey.from_pem(pem)
    assert caught.value.code is Code.KEY_UNSUPPORTED
    assert "PEM" in caught.value.problem.hint


def test_encrypted_and_public_pems_are_no_private_keys() -> None:
    encrypted = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    for pem in (encrypted, generate_publisher_key().public.pem):
        with pytest.raises(Untrusted) as caught:
            PrivateKey.from_pem(pem)
        assert caught.value.code is Code.KEY_UNSUPPORTED


def test_repr_shows_no_secret() -> None:
    key = generate_publisher_key()
    secret = serialization.load_pem_private_key(key.to_pem(), None)
    assert isinstance(secret, ec.EllipticCurvePrivateKey)
    assert f"{secret.private_numbers().private_value}" not in repr(key)
    assert key.public.key_id in repr(key)


def test_a_publisher_does_not_get_an_admission_key() -> None:
    with pytest.raises(ValueError, match="ed25519"):
        generate_publisher_key(Algorithm.ED25519)
