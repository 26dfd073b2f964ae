"""The admission statement: what the service found out about one version, signed with Ed25519.

An in-toto statement in a DSSE envelope. It ties a name (tenant, adapter, number) and a base pin to the
exact files, to the publisher's signature and to the manifest, and lists the SHA-256 of each 4 MiB chunk of
the tensor file, so that a cold load checks chunks while it packs them (ARCHITECTURE, Vocabulary).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from adapterd.loader.errors import Code, error
from adapterd.loader.identity import (
    NAME_PATTERN,
    SIGNATURE_FILE,
    WEIGHTS_FILE,
    BasePin,
    FileEntry,
    canonical_json,
    version_digest,
)
from adapterd.loader.trust.chunks import CHUNK_BYTES, chunk_digests
from adapterd.loader.trust.dsse import IN_TOTO_STATEMENT, Envelope
from adapterd.loader.trust.keys import Algorithm, PrivateKey, PublicKey
from adapterd.loader.trust.strict_json import HEX_64, Fields, Malformed, parse

__all__ = [
    "CHUNK_BYTES",
    "MAX_ENVELOPE_BYTES",
    "NO_PUBLISHER",
    "AdmissionStatement",
    "chunk_digests",
    "issue",
    "open_signed",
    "open_statement",
    "read_unverified",
]

PREDICATE_TYPE = "urn:adapterd:admission:1"
NO_PUBLISHER = "none"
# Base64 of a 1 MiB payload, and the envelope around it.
MAX_ENVELOPE_BYTES = 2 << 20
MAX_FILES = 4096
MAX_CHUNKS = 1 << 14  # 64 GiB

_NAME = re.compile(NAME_PATTERN)
_REVISION = re.compile(r"[0-9a-f]{40}|sha256:[0-9a-f]{64}")
_PUBLISHER = re.compile(r"[0-9a-f]{64}|none")
_BASE_ID = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,512}")
_WORD = re.compile(r"[\x21-\x7e]{1,128}")
_CODE = re.compile(r"[A-Z][A-Z0-9_]{1,63}")
# One component: no separator of any system, no control character, not `.` or `..`, no leading dot.
_PLAIN_FILE = re.compile(r"(?!\.)[^/\\:\x00-\x1f\x7f\ud800-\udfff]{1,255}")
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_ASK_AGAIN = "Fetch the statement from the registry again; if it stays so, tell the registry's operator."


@dataclass(frozen=True, slots=True)
class AdmissionStatement:
    """What was admitted. Building one checks that its parts agree; ValueError if they do not.

    Attributes:
        tenant, adapter, version_number: the name at the time of admission.
        base: the pin that the checks ran against.
        version_digest: of `files`.
        files: all stored files but `model.sig`, sorted by the bytes of path.
        chunks: SHA-256 (hex) of each `CHUNK_BYTES` of the tensor file; the last one may be shorter.
        oms_root_digest, signature_sha256: of the publisher's signature, or None if there is none.
        publisher: key id of the publisher, or `none`.
        limits_id, policy_id: which limits and policy were applied; opaque, printable ASCII.
        allowed: codes that the uploader had turned into warnings, sorted.
        manifest_digest: `Manifest.digest`.
        issued_at: UTC, whole seconds.
    """

    tenant: str
    adapter: str
    version_number: int
    base: BasePin
    version_digest: str
    files: tuple[FileEntry, ...]
    chunks: tuple[str, ...]
    oms_root_digest: str | None
    signature_sha256: str | None
    publisher: str
    limits_id: str
    policy_id: str
    allowed: tuple[str, ...]
    manifest_digest: str
    issued_at: datetime

    def __post_init__(self) -> None:
        try:
            _check_agreement(self)
        except Malformed as e:
            raise ValueError(str(e)) from e

    def file(self, path: str) -> FileEntry:
        """Raises KeyError."""
        for entry in self.files:
            if entry.path == path:
                return entry
        raise KeyError(path)

    @property
    def total_bytes(self) -> int:
        """All files together, without the signature."""
        return sum(f.size for f in self.files)


def issue(statement: AdmissionStatement, key: PrivateKey) -> bytes:
    """The signed envelope, as it is stored and served.

    Raises:
        ValueError: the key is not Ed25519.
    """
    if key.algorithm is not Algorithm.ED25519:
        raise ValueError(f"statements are signed with Ed25519, not {key.algorithm}")
    payload = canonical_json(_as_json(statement))
    envelope = Envelope.signed(payload, key, key.public.key_id)
    return json.dumps(envelope.as_json()).encode("ascii")


def open_statement(envelope: bytes, keys: Iterable[PublicKey]) -> AdmissionStatement:
    """The statement, if one of `keys` signed it. The payload is parsed only then.

    Raises:
        Untrusted: KEY_UNKNOWN, or STATEMENT_INVALID (malformed, or the signature does not hold).
    """
    return open_signed(envelope, keys)[0]


def open_signed(envelope: bytes, keys: Iterable[PublicKey]) -> tuple[AdmissionStatement, str]:
    """As `open_statement`, with the id of the key that signed it: the caller asks whether it is revoked."""
    try:
        opened = _parse_envelope(envelope)
        key_id = _check_signature(opened, [k for k in keys if k.algorithm is Algorithm.ED25519])
        return _from_payload(opened.payload), key_id
    except Malformed as e:
        raise error(Code.STATEMENT_INVALID, _where(e.where), e.message, _ASK_AGAIN) from e


def read_unverified(envelope: bytes) -> AdmissionStatement:
    """The statement without looking at its signature: to find a version by its digest, never to trust it.

    Raises:
        Untrusted: STATEMENT_INVALID for what does not even parse.
    """
    try:
        return _from_payload(_parse_envelope(envelope).payload)
    except Malformed as e:
        raise error(Code.STATEMENT_INVALID, _where(e.where), e.message, _ASK_AGAIN) from e


def _where(inside: str) -> str:
    return f"admission statement: {inside}" if inside else "admission statement"


def _parse_envelope(data: bytes) -> Envelope:
    if len(data) > MAX_ENVELOPE_BYTES:
        raise Malformed("", f"{len(data)} bytes are more than {MAX_ENVELOPE_BYTES}")
    return Envelope.from_json(parse(data))


def _check_signature(envelope: Envelope, keys: list[PublicKey]) -> str:
    """The id of the key that made it."""
    for key in keys:
        if key.key_id == envelope.key_id:
            if key.verifies(envelope.signature, envelope.signed_bytes()):
                return key.key_id
            raise Malformed("signatures[0]", "the signature does not hold for the payload")
    raise error(
        Code.KEY_UNKNOWN, _where("signatures[0]"),
        f"signed by key {envelope.key_id[:64]!r}, which is none of the {len(keys)} known admission keys",
        "If you know this registry, add its admission key: `adapterctl trust add-key PEM --admission`.",
    )  # fmt: skip


def _as_json(s: AdmissionStatement) -> dict[str, Any]:
    return {
        "_type": IN_TOTO_STATEMENT,
        "subject": [{"name": f"{s.tenant}/{s.adapter}", "digest": {"sha256": s.version_digest}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "tenant": s.tenant,
            "adapter": s.adapter,
            "version_number": s.version_number,
            "base": s.base.as_json(),
            "version_digest": s.version_digest,
            "files": [{"path": f.path, "sha256": f.sha256, "size": f.size} for f in s.files],
            "chunks": {"size": CHUNK_BYTES, "sha256": list(s.chunks)},
            "oms_root_digest": s.oms_root_digest,
            "signature_sha256": s.signature_sha256,
            "publisher": s.publisher,
            "limits_id": s.limits_id,
            "policy_id": s.policy_id,
            "allowed": list(s.allowed),
            "manifest_digest": s.manifest_digest,
            "issued_at": s.issued_at.strftime(_TIME),
        },
    }


_PREDICATE_FIELDS = frozenset({
    "tenant", "adapter", "version_number", "base", "version_digest", "files", "chunks", "oms_root_digest",
    "signature_sha256", "publisher", "limits_id", "policy_id", "allowed", "manifest_digest", "issued_at",
})  # fmt: skip


def _from_payload(payload: bytes) -> AdmissionStatement:
    """The exact inverse of `_as_json`. Raises Malformed."""
    outer = Fields(parse(payload), "", need={"_type", "subject", "predicateType", "predicate"})
    outer.exactly("_type", IN_TOTO_STATEMENT)
    outer.exactly("predicateType", PREDICATE_TYPE)
    p = Fields(outer.raw("predicate"), "predicate", need=_PREDICATE_FIELDS)
    try:
        statement = AdmissionStatement(
            tenant=p.text("tenant", _NAME),
            adapter=p.text("adapter", _NAME),
            version_number=p.integer("version_number", least=1),
            base=_base(p.raw("base")),
            version_digest=p.hex64("version_digest"),
            files=tuple(_file(v, f"files[{i}]") for i, v in enumerate(p.items("files", most=MAX_FILES))),
            chunks=_chunks(p.raw("chunks")),
            oms_root_digest=p.hex64_or_null("oms_root_digest"),
            signature_sha256=p.hex64_or_null("signature_sha256"),
            publisher=p.text("publisher", _PUBLISHER),
            limits_id=p.text("limits_id", _WORD),
            policy_id=p.text("policy_id", _WORD),
            allowed=tuple(_code(v) for v in p.items("allowed", most=256)),
            manifest_digest=p.hex64("manifest_digest"),
            issued_at=_time(p.text("issued_at", longest=32)),
        )
    except ValueError as e:
        raise Malformed("predicate", str(e)) from e
    if outer.raw("subject") != _as_json(statement)["subject"]:
        raise Malformed("subject", "must name the predicate's tenant, adapter and version digest")
    return statement


def _base(value: object) -> BasePin:
    fields = Fields(value, "base", need={"id", "revision", "module_table_digest"})
    return BasePin(fields.text("id", _BASE_ID), fields.text("revision", _REVISION), fields.hex64("module_table_digest"))


def _file(value: object, where: str) -> FileEntry:
    fields = Fields(value, where, need={"path", "sha256", "size"})
    return FileEntry(fields.text("path", _PLAIN_FILE), fields.hex64("sha256"), fields.integer("size"))


def _chunks(value: object) -> tuple[str, ...]:
    fields = Fields(value, "chunks", need={"size", "sha256"})
    fields.integer("size", least=CHUNK_BYTES, most=CHUNK_BYTES)
    listed = fields.items("sha256", most=MAX_CHUNKS)
    for index, digest in enumerate(listed):
        if not isinstance(digest, str) or not HEX_64.fullmatch(digest):
            raise Malformed(f"chunks[{index}]", "must be a SHA-256 in lower hex")
    return tuple(listed)


def _code(value: object) -> str:
    if not isinstance(value, str) or not _CODE.fullmatch(value):
        raise Malformed("allowed", "must list problem codes")
    return value


def _time(text: str) -> datetime:
    found = datetime.strptime(text, _TIME).replace(tzinfo=UTC)
    if found.strftime(_TIME) != text:
        raise Malformed("issued_at", "must be UTC in whole seconds, like 2026-01-31T12:00:00Z")
    return found


def _check_agreement(s: AdmissionStatement) -> None:
    """What no single field can tell. Raises Malformed."""
    paths = [f.path for f in s.files]
    if paths != sorted(set(paths), key=str.encode):
        raise Malformed("files", "must be sorted by path, each path once")
    if SIGNATURE_FILE in paths or not all(_PLAIN_FILE.fullmatch(p) for p in paths):
        raise Malformed("files", f"must be plain file names without {SIGNATURE_FILE}")
    if version_digest(s.files) != s.version_digest:
        raise Malformed("version_digest", "is not the digest of the listed files")
    weights = sum(f.size for f in s.files if f.path == WEIGHTS_FILE)
    if len(s.chunks) != -(-weights // CHUNK_BYTES):
        raise Malformed("chunks", f"{len(s.chunks)} digests do not go with {weights} bytes")
    if {s.oms_root_digest is None, s.signature_sha256 is None, s.publisher == NO_PUBLISHER} == {True, False}:
        raise Malformed("publisher", "a signature has a root digest, a SHA-256 and a publisher, or none of them")
    if list(s.allowed) != sorted(set(s.allowed)):
        raise Malformed("allowed", "must be sorted, each code once")
    if s.issued_at.utcoffset() != UTC.utcoffset(None) or s.issued_at.microsecond:
        raise Malformed("issued_at", "must be UTC in whole seconds")
