"""Publisher signatures: OpenSSF Model Signing v1.0 bundles over the exact file set of a version.

The format is the one of `model-signing` 1.1.1 (Sigstore bundle v0.3, DSSE, in-toto statement). The
profile is narrower, so that a signature means one thing only (ARCHITECTURE, Mechanisms): method `files`, SHA-256, no
symlinks, only the usual names ignored and none of them present, resources sorted, unique and equal to the
stored files, the root digest recomputed, exactly one signature. The old tool's mis-encoded signatures
(before 1.0) are not accepted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from adapterd.loader.errors import Code, Untrusted, error
from adapterd.loader.identity import SIGNATURE_FILE, FileEntry, canonical_json, sha256_hex
from adapterd.loader.trust.dsse import IN_TOTO_STATEMENT, Envelope
from adapterd.loader.trust.keys import PUBLISHER_ALGORITHMS, PrivateKey, PublicKey
from adapterd.loader.trust.strict_json import Fields, Malformed, parse

BUNDLE_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
# The payload is capped at 1 MiB; base64 adds a third, the rest of a bundle is about 1 KB.
MAX_BUNDLE_BYTES = 2 << 20
MAX_RESOURCES = 4096
GIT_NAMES = frozenset({".git", ".gitattributes", ".github", ".gitignore"})
IGNORED_NAMES = GIT_NAMES | {SIGNATURE_FILE}

_HINT = re.compile(r"[0-9a-f]{64}")
_RESIGN = "Sign the package again with `adapterctl sign` or `model_signing sign key`."


@dataclass(frozen=True, slots=True)
class OmsSignature:
    """A publisher signature that held.

    Attributes:
        key_id: of the key that made it.
        root_digest: SHA-256 (hex) over the files' digests, in the order of their names.
        bundle_sha256: SHA-256 (hex) of `model.sig` itself.
    """

    key_id: str
    root_digest: str
    bundle_sha256: str


def sign(files: Iterable[FileEntry], key: PrivateKey, *, name: str) -> bytes:
    """The text of `model.sig` for these files (all of the package but `model.sig`).

    Args:
        files: what the package holds; `model.sig` among them is left out.
        key: ECDSA on P-256, P-384 or P-521.
        name: of the model, for people; it is signed, but nothing is decided by it.

    Raises:
        Untrusted: KEY_UNSUPPORTED for another kind of key; MANIFEST_NOT_EXACT for a name that the
            reference tool would not cover.
    """
    if key.algorithm not in PUBLISHER_ALGORITHMS:
        raise error(
            Code.KEY_UNSUPPORTED, "key", f"{key.algorithm} keys do not sign packages",
            "Make a key with `adapterctl keygen` (ECDSA P-256).",
        )  # fmt: skip
    covered = _covered(files)
    payload = canonical_json(_statement(covered, name))
    bundle = {
        "mediaType": BUNDLE_MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": key.public.oms_hint}, "tlogEntries": []},
        "dsseEnvelope": Envelope.signed(payload, key, "").as_json(),
    }
    return json.dumps(bundle, indent=1).encode("ascii") + b"\n"


def verify(bundle: bytes, files: Iterable[FileEntry], keys: Iterable[PublicKey]) -> OmsSignature:
    """Check that one of `keys` signed exactly these files.

    The signature is checked before the payload is parsed. The bundle's hint picks the key to try; the
    signature decides. Revocation is the caller's: pass revoked keys too, and refuse on `key_id`.

    Args:
        bundle: the bytes of `model.sig`.
        files: all stored files; `model.sig` among them is left out.
        keys: the publisher's.

    Raises:
        Untrusted: SIGNATURE_MALFORMED (not a bundle of this profile), KEY_UNKNOWN, SIGNATURE_INVALID,
            MANIFEST_NOT_EXACT (an unsigned file, a signed one missing, or another digest).
    """
    covered = _covered(files)
    try:
        envelope, hint = _parse_bundle(bundle)
        key = _signer(envelope, hint, [k for k in keys if k.algorithm in PUBLISHER_ALGORITHMS])
        root = _check_payload(envelope.payload, covered)
    except Malformed as e:
        raise error(Code.SIGNATURE_MALFORMED, _where(e.where), e.message, _RESIGN) from e
    return OmsSignature(key.key_id, root, sha256_hex(bundle))


def signer_hint(bundle: bytes) -> str | None:
    """Which key (`PublicKey.oms_hint`) a bundle names, unverified: for a message only.

    Raises:
        Untrusted: SIGNATURE_MALFORMED.
    """
    try:
        return _parse_bundle(bundle)[1]
    except Malformed as e:
        raise error(Code.SIGNATURE_MALFORMED, _where(e.where), e.message, _RESIGN) from e


def _where(inside: str) -> str:
    return f"{SIGNATURE_FILE}: {inside}" if inside else SIGNATURE_FILE


def _covered(files: Iterable[FileEntry]) -> list[FileEntry]:
    """All files but the signature, sorted by the bytes of name.

    For names without folders this is the order of the reference tool, too.
    """
    covered = sorted((f for f in files if f.path != SIGNATURE_FILE), key=lambda f: f.path.encode())
    for entry in covered:
        if entry.path in GIT_NAMES:
            raise _not_exact(entry.path, "the signature format ignores this name, so it must not be stored")
    return covered


def _statement(files: Sequence[FileEntry], name: str) -> dict[str, Any]:
    return {
        "_type": IN_TOTO_STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": _root_digest(files)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files", "hash_type": "sha256", "allow_symlinks": False,
                "ignore_paths": sorted(IGNORED_NAMES),
            },
            "resources": [{"name": f.path, "algorithm": "sha256", "digest": f.sha256} for f in files],
        },
    }  # fmt: skip


def _root_digest(files: Sequence[FileEntry]) -> str:
    """SHA-256 over the raw digests in order (`model_signing/_signing/signing.py`, `Payload`)."""
    return hashlib.sha256(b"".join(bytes.fromhex(f.sha256) for f in files)).hexdigest()


def _parse_bundle(data: bytes) -> tuple[Envelope, str | None]:
    """The envelope and the hint. Raises Malformed."""
    if len(data) > MAX_BUNDLE_BYTES:
        raise Malformed("", f"{len(data)} bytes are more than {MAX_BUNDLE_BYTES}")
    bundle = Fields(parse(data), "", need={"mediaType", "verificationMaterial", "dsseEnvelope"})
    bundle.exactly("mediaType", BUNDLE_MEDIA_TYPE)
    material = Fields(
        bundle.raw("verificationMaterial"), "verificationMaterial", need={"publicKey"}, may={"tlogEntries"}
    )
    if material.raw("tlogEntries"):
        raise Malformed(material.at("tlogEntries"), "transparency log entries are not supported")
    # rawBytes and keyDetails stand in bundles of older tools; a key out of a bundle is never believed.
    key = material.raw("publicKey")
    named = Fields(key, "publicKey", need=set(), may={"hint", "rawBytes", "keyDetails"})
    hint = named.text("hint", _HINT) if named.raw("hint") else None
    return Envelope.from_json(bundle.raw("dsseEnvelope"), "dsseEnvelope"), hint


def _signer(envelope: Envelope, hint: str | None, keys: Sequence[PublicKey]) -> PublicKey:
    candidates = [k for k in keys if hint is None or k.oms_hint == hint]
    if not candidates:
        named = f"a key whose PEM has the digest {hint}" if hint else "a key that it does not name"
        raise error(
            Code.KEY_UNKNOWN, SIGNATURE_FILE,
            f"signed by {named}, which is none of the {len(keys)} known publisher keys",
            "If you know this publisher: `adapterctl key add TENANT PUB` on the server,"
            " `adapterctl trust add-key PUB --tenant TENANT` in a trust file.",
        )  # fmt: skip
    signed = envelope.signed_bytes()
    for key in candidates:
        if key.verifies(envelope.signature, signed):
            return key
    raise error(
        Code.SIGNATURE_INVALID,
        SIGNATURE_FILE,
        "the signature does not hold for the signed statement",
        _RESIGN,
    )


def _check_payload(payload: bytes, files: Sequence[FileEntry]) -> str:
    """Returns the root digest. Raises Malformed for another profile, Untrusted for other files."""
    statement = Fields(parse(payload), "payload", need={"_type", "subject", "predicateType", "predicate"})
    statement.exactly("_type", IN_TOTO_STATEMENT)
    statement.exactly("predicateType", PREDICATE_TYPE)
    # The v1.0 predicate tells verifiers to ignore further fields.
    inside = statement.mapping("predicate", most=64)
    predicate = Fields(inside, "predicate", need={"serialization", "resources"}, may=inside.keys())
    _check_serialization(predicate.raw("serialization"))
    _check_resources(_resources(predicate), files)
    root = _root_digest(files)
    if _subject_digest(statement) != root:
        raise _not_exact("subject", "the signed root digest is not that of the signed resources")
    return root


def _check_serialization(value: object) -> None:
    fields = Fields(
        value,
        "serialization",
        need={"method", "hash_type", "allow_symlinks"},
        may={"ignore_paths", "shard_size"},
    )
    fields.exactly("method", "files")
    fields.exactly("hash_type", "sha256")
    if fields.raw("allow_symlinks") is not False:
        raise Malformed(fields.at("allow_symlinks"), "must be false")
    if fields.raw("shard_size") is not None:
        raise Malformed(fields.at("shard_size"), "belongs to another method")
    ignored = fields.items("ignore_paths", most=16) if fields.raw("ignore_paths") is not None else []
    for name in ignored:
        if not isinstance(name, str) or name not in IGNORED_NAMES:
            raise Malformed(fields.at("ignore_paths"), f"{str(name)[:80]!r} may not be left out of a signature")


def _resources(predicate: Fields) -> list[tuple[str, str]]:
    """(name, digest) as signed."""
    found = []
    for index, value in enumerate(predicate.items("resources", most=MAX_RESOURCES)):
        fields = Fields(value, f"resources[{index}]", need={"name", "algorithm", "digest"})
        fields.exactly("algorithm", "sha256")
        found.append((fields.text("name"), fields.hex64("digest")))
    return found


def _check_resources(signed: Sequence[tuple[str, str]], files: Sequence[FileEntry]) -> None:
    """Equal as lists: the files are sorted and unique, so the resources must be, too."""
    stored = {f.path: f.sha256 for f in files}
    names = [name for name, _ in signed]
    if names != sorted(set(names), key=lambda n: n.encode("utf-8", "surrogatepass")):
        raise Malformed("resources", "must be sorted by name, each name once")
    for name in stored:
        if name not in names:
            raise _not_exact(name, "this file is not covered by the publisher's signature")
    for name, digest in signed:
        if name not in stored:
            raise _not_exact(name[:200], "the publisher signed this file, but it is not there")
        if stored[name] != digest:
            raise _not_exact(name, f"the publisher signed SHA-256 {digest}, this file has {stored[name]}")


def _subject_digest(statement: Fields) -> str:
    subjects = statement.items("subject", most=1)
    if len(subjects) != 1:
        raise Malformed(statement.at("subject"), "there must be exactly one subject")
    # The reference tool writes "name"; in-toto lets it be absent when it is empty.
    subject = Fields(subjects[0], "subject", need={"digest"}, may={"name"})
    return Fields(subject.raw("digest"), "subject.digest", need={"sha256"}).hex64("sha256")


def _not_exact(where: str, message: str) -> Untrusted:
    found = error(
        Code.MANIFEST_NOT_EXACT,
        where,
        message,
        "Sign the package again once its files are the ones you mean.",
    )
    assert isinstance(found, Untrusted)
    return found
