"""Seals: how the store knows bytes again that it wrote itself. A MAC of each part, under a key of its own.

AES-256-GMAC (NIST SP 800-38D): a hash is for bytes that somebody else names; whoever makes and checks them alike, with
a secret, needs a MAC, and this one takes a fraction of SHA-256's time where processors have instructions for it.
One key and one nonce must never be for two texts: each seal draws a salt, its key is made of that and of what is
sealed, and the nonce is the part's number. A forger has one guess a load, right once in 2^110 for 2 MiB.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM

from adapterd.loader.store_key import StoreKey

SALT_BYTES = 32
_NONCE_BYTES = 12  # SP 800-38D, 5.2.1.1: the length that needs no hashing
_CONTEXT = b"adapterd.seal/1\n"


@dataclass(frozen=True, slots=True)
class Seal:
    """Of the parts of some bytes.

    Attributes:
        salt: hex; never used for other bytes.
        tags: hex, a part's each, in order.
    """

    salt: str
    tags: tuple[str, ...]


class Sealer:
    """Makes and checks the tags of one seal. For any thread.

    Args:
        about: what is sealed, apart from its bytes: a seal of something else does not hold.
        salt: of the seal to check; None for a new seal, with one `tag` a part.
    """

    def __init__(self, key: StoreKey, about: bytes, salt: str | None = None) -> None:
        self.salt = salt or secrets.token_hex(SALT_BYTES)
        self._key = AES256(key.derived(_CONTEXT + self.salt.encode() + b"\n" + about))

    def tag(self, number: int, pieces: Iterable[memoryview]) -> str:
        """Of the part of this number, which lies in `pieces`."""
        mac = Cipher(self._key, GCM(number.to_bytes(_NONCE_BYTES, "big"))).encryptor()
        for piece in pieces:
            mac.authenticate_additional_data(piece)
        mac.finalize()
        return mac.tag.hex()

    def holds(self, number: int, pieces: Iterable[memoryview], tag: str) -> bool:
        """Whether `tag` was made of these very bytes as this part."""
        return hmac.compare_digest(self.tag(number, pieces).encode(), tag.encode())
