"""How a token is written: `adr` kind `_` id(10) secret(43) crc(6), all base62.

The check sum lets a typo, or a secret scanner's false hit, be told apart from a token without asking
the database (the habit of GitHub's tokens); it is no protection, the secret is.
"""

from __future__ import annotations

import re
import secrets
import string
import zlib
from dataclasses import dataclass

ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
ID_CHARS = 10
SECRET_CHARS = 43  # 43 · log2(62) = 256 bits
CRC_CHARS = 6  # 62^6 > 2^32
_TOKEN = re.compile(
    rf"adr(?P<kind>[usw])_(?P<id>[0-9A-Za-z]{{{ID_CHARS}}})[0-9A-Za-z]{{{SECRET_CHARS}}}(?P<crc>[0-9A-Za-z]{{{CRC_CHARS}}})"
)


@dataclass(frozen=True, slots=True)
class ParsedToken:
    """A well-formed token. `text` is the whole of it and secret."""

    kind: str
    id: str
    text: str

    def __repr__(self) -> str:
        return f"ParsedToken(kind={self.kind!r}, id={self.id!r})"


def new_token(kind: str) -> ParsedToken:
    """A fresh random token from the operating system's generator."""
    token_id = _random(ID_CHARS)
    body = f"adr{kind}_{token_id}{_random(SECRET_CHARS)}"
    return ParsedToken(kind, token_id, body + checksum(body))


def parse_token(text: str) -> ParsedToken | None:
    """The token, or None for what is not written like one or has a wrong check sum."""
    match = _TOKEN.fullmatch(text)
    if match is None or match["crc"] != checksum(text[:-CRC_CHARS]):
        return None
    return ParsedToken(match["kind"], match["id"], text)


def checksum(body: str) -> str:
    """CRC-32 of the ASCII bytes, in six base62 digits, most significant first."""
    value = zlib.crc32(body.encode("ascii"))
    digits = []
    for _ in range(CRC_CHARS):
        value, digit = divmod(value, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))


def _random(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))
