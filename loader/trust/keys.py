"""Signing keys: ECDSA on the NIST curves for publishers, Ed25519 for the service's admission statements.

Publishers' curves and their hashes are those of the OpenSSF Model Signing tool (`model-signing` 1.1.1,
`_signing/sign_ec_key.py`): P-256 with SHA-256, P-384 with SHA-384, P-521 with SHA-512.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from adapterd.loader.errors import Code, error

_PUBLIC_HINT = "Give a PEM public key: ECDSA on P-256, P-384 or P-521, or Ed25519."
_PRIVATE_HINT = "Give an unencrypted PKCS#8 PEM key, as `adapterctl keygen` makes it."
MAX_PEM_BYTES = 16_384


class Algorithm(StrEnum):
    """Every kind of key that is ever used; nothing else verifies."""

    P256 = "ecdsa-p256"
    P384 = "ecdsa-p384"
    P521 = "ecdsa-p521"
    ED25519 = "ed25519"


PUBLISHER_ALGORITHMS = frozenset({Algorithm.P256, Algorithm.P384, Algorithm.P521})

_CURVES: dict[str, Algorithm] = {
    "secp256r1": Algorithm.P256, "secp384r1": Algorithm.P384, "secp521r1": Algorithm.P521,
}  # fmt: skip
_EC: dict[Algorithm, tuple[type[ec.EllipticCurve], type[hashes.HashAlgorithm]]] = {
    Algorithm.P256: (ec.SECP256R1, hashes.SHA256),
    Algorithm.P384: (ec.SECP384R1, hashes.SHA384),
    Algorithm.P521: (ec.SECP521R1, hashes.SHA512),
}

_CryptoPublic = ec.EllipticCurvePublicKey | Ed25519PublicKey
_CryptoPrivate = ec.EllipticCurvePrivateKey | Ed25519PrivateKey


def _algorithm(key: object, hint: str) -> Algorithm:
    if isinstance(key, Ed25519PublicKey | Ed25519PrivateKey):
        return Algorithm.ED25519
    if isinstance(key, ec.EllipticCurvePublicKey | ec.EllipticCurvePrivateKey) and key.curve.name in _CURVES:
        return _CURVES[key.curve.name]
    raise error(Code.KEY_UNSUPPORTED, "key", "the key's algorithm is not one that is used here", hint)


def _as_bytes(pem: bytes | str, hint: str) -> bytes:
    data = pem.encode() if isinstance(pem, str) else pem
    if len(data) > MAX_PEM_BYTES:
        raise error(Code.KEY_UNSUPPORTED, "key", f"{len(data)} bytes are too many for a PEM key", hint)
    return data


@dataclass(frozen=True, eq=False)
class PublicKey:
    """A public key. Two keys are equal when their `key_id` is.

    Law: `PublicKey.from_pem(key.pem) == key`.
    """

    _key: _CryptoPublic
    algorithm: Algorithm

    @classmethod
    def from_pem(cls, pem: bytes | str) -> PublicKey:
        """Raises Untrusted (KEY_UNSUPPORTED) for anything but a PEM public key of a known algorithm."""
        data = _as_bytes(pem, _PUBLIC_HINT)
        try:
            key = serialization.load_pem_public_key(data)
        except (ValueError, UnsupportedAlgorithm) as e:
            raise error(Code.KEY_UNSUPPORTED, "key", "this is not a PEM public key", _PUBLIC_HINT) from e
        algorithm = _algorithm(key, _PUBLIC_HINT)
        assert isinstance(key, ec.EllipticCurvePublicKey | Ed25519PublicKey)
        return cls(key, algorithm)

    @cached_property
    def pem(self) -> str:
        """SubjectPublicKeyInfo in PEM: one form for every spelling it was read from."""
        return self._encoded(serialization.Encoding.PEM).decode("ascii")

    @cached_property
    def key_id(self) -> str:
        """Hex SHA-256 of the DER SubjectPublicKeyInfo."""
        return hashlib.sha256(self._encoded(serialization.Encoding.DER)).hexdigest()

    @cached_property
    def oms_hint(self) -> str:
        """What an OMS bundle calls this key: hex SHA-256 of the PEM text (`model-signing` 1.1.1)."""
        return hashlib.sha256(self.pem.encode("ascii")).hexdigest()

    def _encoded(self, encoding: serialization.Encoding) -> bytes:
        return self._key.public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Whether `signature` is this key's over `data` (ECDSA: DER form, the curve's own hash)."""
        try:
            if isinstance(self._key, Ed25519PublicKey):
                self._key.verify(signature, data)
            else:
                self._key.verify(signature, data, ec.ECDSA(_EC[self.algorithm][1]()))
        except InvalidSignature:
            return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and self.key_id == other.key_id

    def __hash__(self) -> int:
        return hash(self.key_id)

    def __repr__(self) -> str:
        return f"PublicKey({self.algorithm}, {self.key_id})"


@dataclass(frozen=True, eq=False)
class PrivateKey:
    """A private key; its repr shows the public half only."""

    _key: _CryptoPrivate
    algorithm: Algorithm

    @classmethod
    def from_pem(cls, pem: bytes | str) -> PrivateKey:
        """Raises Untrusted (KEY_UNSUPPORTED) for anything but an unencrypted PEM key of a known algorithm."""
        data = _as_bytes(pem, _PRIVATE_HINT)
        try:
            key = serialization.load_pem_private_key(data, password=None)
        except TypeError as e:  # what cryptography raises for an encrypted key without a password
            raise error(Code.KEY_UNSUPPORTED, "key", "the private key is encrypted", _PRIVATE_HINT) from e
        except (ValueError, UnsupportedAlgorithm) as e:
            raise error(Code.KEY_UNSUPPORTED, "key", "this is not a PEM private key", _PRIVATE_HINT) from e
        algorithm = _algorithm(key, _PRIVATE_HINT)
        assert isinstance(key, ec.EllipticCurvePrivateKey | Ed25519PrivateKey)
        return cls(key, algorithm)

    def to_pem(self) -> bytes:
        """PKCS#8, unencrypted; whoever writes it to a file makes that 0600."""
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @cached_property
    def public(self) -> PublicKey:
        return PublicKey(self._key.public_key(), self.algorithm)

    def sign(self, data: bytes) -> bytes:
        """The signature over `data`, the same each time (ECDSA: RFC 6979, DER form, the curve's own hash)."""
        if isinstance(self._key, Ed25519PrivateKey):
            return self._key.sign(data)
        return self._key.sign(data, ec.ECDSA(_EC[self.algorithm][1](), deterministic_signing=True))

    def __repr__(self) -> str:
        return f"PrivateKey of {self.public!r}"


def generate_publisher_key(algorithm: Algorithm = Algorithm.P256) -> PrivateKey:
    """A new ECDSA key. Raises ValueError for an algorithm that publishers do not use."""
    if algorithm not in PUBLISHER_ALGORITHMS:
        raise ValueError(f"{algorithm} is not a publisher's algorithm")
    return PrivateKey(ec.generate_private_key(_EC[algorithm][0]()), algorithm)


def generate_admission_key() -> PrivateKey:
    """A new Ed25519 key for the service's statements."""
    return PrivateKey(Ed25519PrivateKey.generate(), Algorithm.ED25519)
