"""Publisher signatures, with the reference tool as oracle in both directions."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_signing import hashing, signing, verifying

from adapterd.loader.errors import Code, Untrusted
from adapterd.loader.identity import FileEntry, sha256_hex
from adapterd.loader.trust import oms
from adapterd.loader.trust.dsse import IN_TOTO_PAYLOAD, pae
from adapterd.loader.trust.keys import (
    Algorithm,
    PrivateKey,
    generate_admission_key,
    generate_publisher_key,
)

CONTENT = {
    "adapter_config.json": b'{"r": 4}',
    "adapter_model.safetensors": bytes(range(256)) * 40,
    "README.md": "Grüße\n".encode(),
    "tokenizer.json": b"{}",
}
CURVES = [Algorithm.P256, Algorithm.P384, Algorithm.P521]
FILES = [FileEntry(name, sha256_hex(data), len(data)) for name, data in CONTENT.items()]
KEY = generate_publisher_key()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "finance"
    folder.mkdir()
    for name, data in CONTENT.items():
        (folder / name).write_bytes(data)
    return folder


def write_keys(key: PrivateKey, folder: Path) -> tuple[Path, Path]:
    private, public = folder / "key.pem", folder / "key.pub"
    private.write_bytes(key.to_pem())
    public.write_text(key.public.pem)
    return private, public


# --- the reference tool


@pytest.mark.parametrize("curve", CURVES)
def test_the_reference_tool_accepts_what_we_sign(package: Path, tmp_path: Path, curve: Algorithm) -> None:
    key = generate_publisher_key(curve)
    _, public = write_keys(key, tmp_path)
    (package / "model.sig").write_bytes(oms.sign(FILES, key, name="finance"))
    config = verifying.Config().use_elliptic_key_verifier(public_key=public)
    config.verify(package, package / "model.sig")
    (package / "README.md").write_bytes(b"changed")
    with pytest.raises(ValueError, match="mismatch"):
        config.verify(package, package / "model.sig")


@pytest.mark.parametrize("curve", CURVES)
def test_we_accept_what_the_reference_tool_signs(package: Path, tmp_path: Path, curve: Algorithm) -> None:
    key = generate_publisher_key(curve)
    private, _ = write_keys(key, tmp_path)
    signer = signing.Config().use_elliptic_key_signer(private_key=private)
    signer.set_hashing_config(hashing.Config().set_ignored_paths(paths=["model.sig"]))
    signer.sign(package, package / "model.sig")
    bundle = (package / "model.sig").read_bytes()
    found = oms.verify(bundle, FILES, [generate_publisher_key(curve).public, key.public])
    assert found.key_id == key.public.key_id
    assert found.bundle_sha256 == sha256_hex(bundle)
    by_name = sorted(CONTENT.items(), key=lambda item: item[0].encode())
    joined = b"".join(hashlib.sha256(data).digest() for _, data in by_name)
    assert found.root_digest == sha256_hex(joined)


def test_the_tool_s_command_line_both_ways(package: Path, tmp_path: Path) -> None:
    private, public = write_keys(KEY, tmp_path)
    tool = [sys.executable, "-m", "model_signing"]
    signature = package / "model.sig"
    signature.write_bytes(oms.sign(FILES, KEY, name="finance"))
    verify = [
        *tool,
        "verify",
        "key",
        str(package),
        "--signature",
        str(signature),
        "--public_key",
        str(public),
    ]
    ran = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    signature.unlink()
    sign = [*tool, "sign", "key", str(package), "--signature", str(signature), "--private_key", str(private)]
    subprocess.run(sign, capture_output=True, check=True)
    assert oms.verify(signature.read_bytes(), FILES, [KEY.public]).key_id == KEY.public.key_id


# --- bundles that are taken apart


def resigned(change: Callable[[dict[str, Any]], None], key: PrivateKey = KEY) -> bytes:
    """Our bundle with a changed statement, properly signed again: what a careless publisher may make."""
    bundle = json.loads(oms.sign(FILES, key, name="finance"))
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    change(statement)
    return with_payload(bundle, json.dumps(statement).encode(), key)


def with_payload(bundle: dict[str, Any], payload: bytes, key: PrivateKey = KEY) -> bytes:
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(key.sign(pae(payload))).decode()
    return json.dumps(bundle).encode()


def rebuilt(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Our bundle with its unsigned parts changed."""
    bundle = json.loads(oms.sign(FILES, KEY, name="finance"))
    change(bundle)
    return json.dumps(bundle).encode()


def refusal(bundle: bytes, files: list[FileEntry] = FILES, keys: list[Any] | None = None) -> Untrusted:
    with pytest.raises(Untrusted) as caught:
        oms.verify(bundle, files, [KEY.public] if keys is None else keys)
    return caught.value


def test_ours_holds_and_leaves_model_sig_out() -> None:
    extra = [*FILES, FileEntry("model.sig", "0" * 64, 9)]
    assert oms.verify(oms.sign(extra, KEY, name="x"), extra, [KEY.public]).key_id == KEY.public.key_id
    assert oms.signer_hint(oms.sign(FILES, KEY, name="x")) == KEY.public.oms_hint


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ([*FILES, FileEntry("tokenizer_config.json", "1" * 64, 3)], "tokenizer_config.json"),
        (FILES[1:], "adapter_config.json"),
        ([FileEntry(FILES[0].path, "2" * 64, FILES[0].size), *FILES[1:]], "adapter_config.json"),
        ([], "README.md"),
    ],
    ids=["unsigned-file", "signed-file-missing", "other-bytes", "nothing"],
)
def test_the_files_must_be_exactly_the_signed_ones(files: list[FileEntry], where: str) -> None:
    found = refusal(oms.sign(FILES, KEY, name="finance"), files)
    assert found.code is Code.MANIFEST_NOT_EXACT
    assert found.problem.where == where


@pytest.mark.parametrize("name", [".git", ".gitignore", ".gitattributes", ".github"])
def test_a_name_that_the_format_ignores_is_neither_signed_nor_accepted(name: str) -> None:
    files = [*FILES, FileEntry(name, "3" * 64, 1)]
    assert refusal(oms.sign(FILES, KEY, name="x"), files).code is Code.MANIFEST_NOT_EXACT
    with pytest.raises(Untrusted) as caught:
        oms.sign(files, KEY, name="x")
    assert caught.value.problem.where == name


def _serialization(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda s: s["predicate"]["serialization"].update(changes)


def _reverse(statement: dict[str, Any]) -> None:
    statement["predicate"]["resources"].reverse()


def _twice(statement: dict[str, Any]) -> None:
    statement["predicate"]["resources"].insert(0, statement["predicate"]["resources"][0])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_serialization(method="shards"), Code.SIGNATURE_MALFORMED),
        (_serialization(method="shards", shard_size=100), Code.SIGNATURE_MALFORMED),
        (_serialization(hash_type="blake3"), Code.SIGNATURE_MALFORMED),
        (_serialization(allow_symlinks=True), Code.SIGNATURE_MALFORMED),
        (_serialization(allow_symlinks=0), Code.SIGNATURE_MALFORMED),
        (_serialization(ignore_paths=["adapter_config.json"]), Code.SIGNATURE_MALFORMED),
        (_serialization(ignore_paths=[["model.sig"]]), Code.SIGNATURE_MALFORMED),
        (_serialization(follow="yes"), Code.SIGNATURE_MALFORMED),
        (_reverse, Code.SIGNATURE_MALFORMED),
        (_twice, Code.SIGNATURE_MALFORMED),
        (lambda s: s["predicate"]["resources"][0].update(algorithm="sha512"), Code.SIGNATURE_MALFORMED),
        (lambda s: s["predicate"]["resources"][0].update(digest="AB" * 32), Code.SIGNATURE_MALFORMED),
        (lambda s: s["predicate"]["resources"][0].update(name="../README.md"), Code.MANIFEST_NOT_EXACT),
        (lambda s: s["predicate"]["resources"][0].update(name="\ud800"), Code.SIGNATURE_MALFORMED),
        (lambda s: s["predicate"]["resources"].pop(), Code.MANIFEST_NOT_EXACT),
        (lambda s: s["subject"][0]["digest"].update(sha256="4" * 64), Code.MANIFEST_NOT_EXACT),
        (lambda s: s["subject"].append(s["subject"][0]), Code.SIGNATURE_MALFORMED),
        (lambda s: s.update(subject=[]), Code.SIGNATURE_MALFORMED),
        (lambda s: s.update(predicateType="https://model_signing/Digests/v0.1"), Code.SIGNATURE_MALFORMED),
        (lambda s: s.update(_type="https://in-toto.io/Statement/v0.1"), Code.SIGNATURE_MALFORMED),
        (lambda s: s.update(extra=1), Code.SIGNATURE_MALFORMED),
    ],
)  # fmt: skip
def test_a_signed_statement_of_another_profile_is_refused(change: Any, code: Code) -> None:
    assert refusal(resigned(change)).code is code


def test_a_further_predicate_field_is_ignored_as_the_format_asks() -> None:
    bundle = resigned(lambda s: s["predicate"].update(model_card="README.md"))
    assert oms.verify(bundle, FILES, [KEY.public]).key_id == KEY.public.key_id


@pytest.mark.parametrize(
    "payload",
    [
        b"{",
        b"[]",
        b'{"a": NaN}',
        b'{"_type": 1, "_type": 2}',
        b"\xff",
        b"[" * 5000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=["cut", "list", "nan", "twice", "not-utf8", "deep", "long-number"],
)
def test_a_signed_payload_that_is_no_statement(payload: bytes) -> None:
    bundle = json.loads(oms.sign(FILES, KEY, name="finance"))
    assert refusal(with_payload(bundle, payload)).code is Code.SIGNATURE_MALFORMED


def _envelope(bundle: dict[str, Any]) -> dict[str, Any]:
    envelope: dict[str, Any] = bundle["dsseEnvelope"]
    return envelope


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.update(mediaType="application/vnd.dev.sigstore.bundle.v0.2+json"),
        lambda b: b.update(messageSignature={}),
        lambda b: b.pop("verificationMaterial"),
        lambda b: b.update(verificationMaterial={"certificate": {"rawBytes": "AAAA"}}),
        lambda b: b["verificationMaterial"].update(tlogEntries=[{"logIndex": "1"}]),
        lambda b: b["verificationMaterial"]["publicKey"].update(hint="zz"),
        lambda b: _envelope(b).update(payloadType="text/plain"),
        lambda b: _envelope(b).update(payload="*not base64*"),
        lambda b: _envelope(b).update(payload=_envelope(b)["payload"] + "\n"),
        lambda b: _envelope(b).update(payload="A" * (2 << 20)),
        lambda b: _envelope(b).update(signatures=[]),
        lambda b: _envelope(b)["signatures"].append(_envelope(b)["signatures"][0]),
        lambda b: _envelope(b)["signatures"][0].update(cert="x"),
    ],
)  # fmt: skip
def test_a_bundle_of_another_form_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    assert refusal(rebuilt(change)).code is Code.SIGNATURE_MALFORMED


@pytest.mark.parametrize("data", [b"", b"not json", b"{}", b" " * (3 << 20), b'{"mediaType": 1, "mediaType": 2}'])
def test_what_is_no_bundle_at_all(data: bytes) -> None:
    found = refusal(data)
    assert found.code is Code.SIGNATURE_MALFORMED
    assert found.problem.where.startswith("model.sig")


def test_many_escaped_quotes_are_read_in_one_pass() -> None:
    """An unclosed string of escapes must not be scanned again from each of them; it would take hours."""
    assert refusal(b'{"a": "' + b'\\"' * 500_000).code is Code.SIGNATURE_MALFORMED


def test_every_flipped_bit_of_payload_and_signature_is_found() -> None:
    bundle = json.loads(oms.sign(FILES, KEY, name="finance"))
    payload = bytearray(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    for position in range(0, len(payload), 37):
        changed = bytearray(payload)
        changed[position] ^= 1
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()
        assert refusal(json.dumps(bundle).encode()).code is Code.SIGNATURE_INVALID


def test_the_hint_picks_the_key_and_the_signature_decides() -> None:
    other = generate_publisher_key()
    bundle = oms.sign(FILES, KEY, name="finance")
    assert refusal(bundle, keys=[other.public]).code is Code.KEY_UNKNOWN
    assert refusal(bundle, keys=[]).code is Code.KEY_UNKNOWN
    claims_other = rebuilt(lambda b: b["verificationMaterial"]["publicKey"].update(hint=other.public.oms_hint))
    assert refusal(claims_other, keys=[KEY.public, other.public]).code is Code.SIGNATURE_INVALID
    claims_nothing = rebuilt(lambda b: b["verificationMaterial"]["publicKey"].pop("hint"))
    found = oms.verify(claims_nothing, FILES, [other.public, KEY.public])
    assert found.key_id == KEY.public.key_id
    assert refusal(claims_nothing, keys=[other.public]).code is Code.SIGNATURE_INVALID


def test_a_key_inside_the_bundle_is_never_believed() -> None:
    stranger = generate_publisher_key()
    der = base64.b64encode(stranger.public.pem.encode()).decode()
    bundle = json.loads(oms.sign(FILES, stranger, name="finance"))
    bundle["verificationMaterial"]["publicKey"] = {"rawBytes": der, "keyDetails": "PKIX_ECDSA_P256_SHA_256"}
    assert refusal(json.dumps(bundle).encode()).code is Code.SIGNATURE_INVALID


def test_the_old_tool_s_wrong_encoding_is_not_accepted() -> None:
    """model-signing 0.2 signed the text of a bytes object; the tool still takes it, we do not."""
    bundle = json.loads(oms.sign(FILES, KEY, name="finance"))
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    wrong = f"DSSEV1 {len(IN_TOTO_PAYLOAD)} {IN_TOTO_PAYLOAD} {len(payload)} {payload!r}".encode()
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(KEY.sign(wrong)).decode()
    assert refusal(json.dumps(bundle).encode()).code is Code.SIGNATURE_INVALID


def test_admission_keys_sign_no_packages() -> None:
    admission = generate_admission_key()
    with pytest.raises(Untrusted) as caught:
        oms.sign(FILES, admission, name="finance")
    assert caught.value.code is Code.KEY_UNSUPPORTED
    assert refusal(oms.sign(FILES, KEY, name="x"), keys=[admission.public]).code is Code.KEY_UNKNOWN
