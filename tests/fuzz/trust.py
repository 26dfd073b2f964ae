"""The codecs of the two signed documents: OMS bundles (`model.sig`) and admission statements.

An input is one byte of form and the rest. Form 0: the text of a bundle or an envelope, in which `@PAYLOAD@`
and `@SIGNATURE@` stand for the sound payload and for a signature that holds over whatever payload is there.
Form 1: a payload, which the target wraps and signs: so the fuzzer reaches what lies behind the signature,
where an attacker stands who has a key.
"""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from random import Random
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import strategies as st

from adapterd.loader.errors import Code, Untrusted
from adapterd.loader.identity import BasePin, FileEntry, version_digest
from adapterd.loader.trust import oms
from adapterd.loader.trust.admission import AdmissionStatement, issue, open_statement, read_unverified
from adapterd.loader.trust.dsse import Envelope, pae
from adapterd.loader.trust.keys import PrivateKey
from fuzz.target import Defect, Target
from strategies.spelling import NO_INTEGERS, NO_STRINGS, Table, spelled

DOCUMENT, INNER = b"\0", b"\1"
PAYLOAD, SIGNATURE = b"@PAYLOAD@", b"@SIGNATURE@"
FILES = (
    FileEntry("adapter_config.json", "1" * 64, 20),
    FileEntry("adapter_model.safetensors", "2" * 64, 5 << 20),
)
CODES = {
    Code.SIGNATURE_MALFORMED, Code.SIGNATURE_INVALID, Code.KEY_UNKNOWN, Code.MANIFEST_NOT_EXACT, Code.STATEMENT_INVALID,
}  # fmt: skip
_PEM = (
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.NoEncryption(),
)


@cache
def publisher() -> PrivateKey:
    """Always the same, so that an input means the same tomorrow."""
    return PrivateKey.from_pem(ec.derive_private_key(20261101, ec.SECP256R1()).private_bytes(*_PEM))


@cache
def admission() -> PrivateKey:
    return PrivateKey.from_pem(
        ed25519.Ed25519PrivateKey.from_private_bytes(b"adapterd fuzz key, not a secret.").private_bytes(*_PEM)
    )


@cache
def statement() -> AdmissionStatement:
    """A sound one."""
    return AdmissionStatement(
        tenant="acme", adapter="finance", version_number=3, base=BasePin("org/base", "a" * 40, "b" * 64),
        version_digest=version_digest(FILES), files=FILES, chunks=("c" * 64, "d" * 64), oms_root_digest="e" * 64,
        signature_sha256="f" * 64, publisher="0" * 64, limits_id="default", policy_id="default",
        allowed=("ZERO_DELTA",), manifest_digest="9" * 64, issued_at=datetime(2026, 11, 1, tzinfo=UTC),
    )  # fmt: skip


@cache
def _bundle() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(oms.sign(FILES, publisher(), name="finance"))
    return found


@cache
def _payload(kind: str) -> bytes:
    envelope = _bundle()["dsseEnvelope"] if kind == "oms" else json.loads(issue(statement(), admission()))
    return base64.b64decode(envelope["payload"])


def _template(kind: str, payload: str = PAYLOAD.decode()) -> dict[str, Any]:
    """Bundle or envelope with the two marks in it."""
    key_id = admission().public.key_id if kind == "admission" else ""
    envelope = {
        "payload": payload,
        "payloadType": "application/vnd.in-toto+json",
        "signatures": [{"keyid": key_id, "sig": SIGNATURE.decode()}],
    }
    return envelope if kind == "admission" else {**_bundle(), "dsseEnvelope": envelope}


def filled(kind: str, data: bytes) -> bytes:
    """The document that an input stands for."""
    if data[:1] == INNER:
        data = DOCUMENT + json.dumps(_template(kind, base64.b64encode(data[1:]).decode())).encode()
    data = data[1:].replace(PAYLOAD, base64.b64encode(_payload(kind)))
    if SIGNATURE in data:
        key = publisher() if kind == "oms" else admission()
        data = data.replace(SIGNATURE, base64.b64encode(key.sign(pae(_payload_in(kind, data)))))
    return data


def _payload_in(kind: str, data: bytes) -> bytes:
    """What there is to sign; empty where the document is broken before its payload."""
    try:
        outer = json.loads(data)
        return base64.b64decode((outer["dsseEnvelope"] if kind == "oms" else outer)["payload"], validate=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        return b""


def run_oms(data: bytes) -> str:
    """Refused as Untrusted, or signed by our key for just these files."""
    document = filled("oms", data)
    keys = [publisher().public]
    try:
        oms.signer_hint(document)
        held = oms.verify(document, FILES, keys)
    except Untrusted as refusal:
        return _told(refusal)
    payload = json.loads(_payload_in("oms", document))
    resources = [(r["name"], r["digest"]) for r in payload["predicate"]["resources"]]
    if resources != [(f.path, f.sha256) for f in FILES] or held.key_id != keys[0].key_id:
        raise Defect(f"a signature over {resources} was taken for one over our files")
    return "accepted"


def run_admission(data: bytes) -> str:
    """Refused as Untrusted, or a statement that says the same when it is issued again."""
    document = filled("admission", data)
    try:
        opened = open_statement(document, [admission().public])
    except Untrusted as refusal:
        with suppress(Untrusted):
            read_unverified(document)
        return _told(refusal)
    again = open_statement(issue(opened, admission()), [admission().public])
    if again != opened:
        raise Defect(f"{opened} comes back as {again}")
    return "accepted"


def _told(refusal: Untrusted) -> str:
    if refusal.code not in CODES:
        raise Defect(f"refused with a code of another room: {refusal}") from refusal
    return str(refusal.code)


def _slipped(value: Any, random: Random, chance: float) -> Any:
    """`value` with something else in one or two places."""
    if random.random() < chance:
        return random.choice(
            (*NO_INTEGERS, *NO_STRINGS, None, [], {}, 0, "", "x" * 2000, "a" * 64, "../x", "é\0", value)
        )
    if isinstance(value, dict):
        pairs = [(k, _slipped(v, random, chance)) for k, v in value.items() if random.random() > chance / 4]
        if random.random() < chance / 2:
            pairs.append(random.choice([*pairs, ("extra", 1), ("", None)]))
        return Table.of(pairs)
    if isinstance(value, list):
        items = [_slipped(item, random, chance) for item in value]
        if random.random() < chance:
            random.shuffle(items)
        return items * random.choice((1, 2)) if random.random() < chance / 2 else items
    return value


@st.composite
def _documents(draw: st.DrawFn, kind: str) -> bytes:
    random = Random(draw(st.integers(0, 2**32 - 1)))
    inner, outer = draw(st.sampled_from(((0.0, 0.0), (0.02, 0.0), (0.05, 0.0), (0.0, 0.05), (0.02, 0.02))))
    payload = spelled(_slipped(json.loads(_payload(kind)), random, inner), random, plain=draw(st.booleans()))
    template = _template(kind, base64.b64encode(payload).decode())
    return DOCUMENT + spelled(_slipped(template, random, outer), random, plain=draw(st.booleans()))


def seeds(kind: str) -> dict[str, bytes]:
    """The sound document, with its payload open to mutation, and without a signature that holds."""
    plain = Envelope(b"{}", b"x", "").as_json()
    return {
        "sound": DOCUMENT + json.dumps(_template(kind)).encode(),
        "empty_payload": INNER + b"{}",
        "payload": INNER + _payload(kind),
        "unsigned": DOCUMENT
        + json.dumps(plain if kind == "admission" else {**_bundle(), "dsseEnvelope": plain}).encode(),
    }


_WORDS = (PAYLOAD, SIGNATURE, b'"payload":', b'"signatures":', b'"hint":', b"null", b"e30=", b"-0", b"\\ud800", b"NaN")
_ROOMS = ("adapterd.loader.trust", "adapterd.loader.formats.json_strict")
OMS = Target("oms", run_oms, _documents("oms"), _ROOMS, _WORDS)
ADMISSION = Target("admission", run_admission, _documents("admission"), _ROOMS, _WORDS)
