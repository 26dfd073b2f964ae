"""DSSE envelopes with exactly one signature (secure-systems-lab/dsse v1.0.0, `protocol.md`, `envelope.md`).

`securesystemslib.dsse` holds the same format, and the tests check against it. It is not imported here:
it loads every cloud SDK that is installed (0.5 s with boto3), its base64 is lenient, and an OMS bundle's
signature has an empty key id, which it cannot match to a key.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from adapterd.loader.trust.keys import PrivateKey
from adapterd.loader.trust.strict_json import Fields, Malformed

IN_TOTO_PAYLOAD = "application/vnd.in-toto+json"
IN_TOTO_STATEMENT = "https://in-toto.io/Statement/v1"
# ARCHITECTURE, OMS profile. A version of 64 files needs about 10 KB, 4,096 chunk digests 300 KB.
MAX_PAYLOAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Envelope:
    """A payload and its one signature. `key_id` is a hint and may be empty: the signature decides."""

    payload: bytes
    signature: bytes
    key_id: str

    @classmethod
    def signed(cls, payload: bytes, key: PrivateKey, key_id: str) -> Envelope:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a payload of {len(payload)} bytes is larger than {MAX_PAYLOAD_BYTES}")
        return cls(payload, key.sign(pae(payload)), key_id)

    @classmethod
    def from_json(cls, value: object, where: str = "") -> Envelope:
        """Raises Malformed. The payload is not looked into."""
        fields = Fields(value, where, need={"payload", "payloadType", "signatures"})
        fields.exactly("payloadType", IN_TOTO_PAYLOAD)
        payload = decode_base64(fields, "payload", MAX_PAYLOAD_BYTES)
        signatures = fields.items("signatures", most=1)
        if len(signatures) != 1:
            raise Malformed(fields.at("signatures"), "there must be exactly one signature")
        one = Fields(signatures[0], fields.at("signatures[0]"), need={"sig"}, may={"keyid"})
        key_id = one.text("keyid", longest=128) if one.raw("keyid") is not None else ""
        return cls(payload, decode_base64(one, "sig", 1024), key_id)

    def as_json(self) -> dict[str, Any]:
        return {
            "payload": base64.b64encode(self.payload).decode("ascii"),
            "payloadType": IN_TOTO_PAYLOAD,
            "signatures": [{"keyid": self.key_id, "sig": base64.b64encode(self.signature).decode("ascii")}],
        }

    def signed_bytes(self) -> bytes:
        """What the signature is over."""
        return pae(self.payload)


def pae(payload: bytes) -> bytes:
    """The pre-authentication encoding of an in-toto payload (DSSE `protocol.md`)."""
    kind = IN_TOTO_PAYLOAD.encode("ascii")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def decode_base64(fields: Fields, name: str, most_bytes: int) -> bytes:
    """Standard base64, padded, nothing else in it. Raises Malformed."""
    text = fields.text(name, longest=(most_bytes + 2) // 3 * 4)
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as e:
        raise Malformed(fields.at(name), "is not base64") from e
