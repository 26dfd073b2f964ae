from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from adapterd.loader.errors import AdapterdError, Code, Untrusted
from adapterd.loader.identity import FileEntry, sha256_hex
from adapterd.loader.trust.admission import (
    CHUNK_BYTES,
    chunk_digests,
    issue,
    open_signed,
    open_statement,
    read_unverified,
)
from adapterd.loader.trust.chunks import ChunkHasher
from adapterd.loader.trust.dsse import pae
from adapterd.loader.trust.keys import generate_admission_key, generate_publisher_key
from fakes.readers import BytesReader

from .conftest import Signed


def test_a_statement_round_trips(signed: Signed) -> None:
    for statement in (
        signed.statement,
        replace(signed.statement, allowed=("SCALE_SUSPECT", "ZERO_DELTA")),
        replace(signed.statement, oms_root_digest=None, signature_sha256=None, publisher="none"),
    ):
        envelope = issue(statement, signed.registry)
        assert open_statement(envelope, [generate_admission_key().public, signed.registry.public]) == statement
        assert read_unverified(envelope) == statement
        assert open_signed(envelope, [signed.registry.public])[1] == signed.registry.public.key_id


def test_it_is_a_dsse_envelope_to_securesystemslib(signed: Signed) -> None:
    public = signed.registry.public
    theirs = Envelope.from_dict(json.loads(signed.envelope()))
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = SSlibKey.from_crypto(load_pem_public_key(public.pem.encode()), keyid=public.key_id)
    assert theirs.verify([key], 1) == {public.key_id: key}
    assert theirs.pae() == pae(theirs.payload)


def test_only_ed25519_admits(signed: Signed) -> None:
    with pytest.raises(ValueError, match="Ed25519"):
        issue(signed.statement, generate_publisher_key())
    with pytest.raises(Untrusted) as caught:
        open_statement(signed.envelope(), [signed.publisher.public])
    assert caught.value.code is Code.KEY_UNKNOWN


def resigned(signed: Signed, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A changed payload under a good signature: what a registry of another make could send."""
    envelope = json.loads(signed.envelope())
    payload = json.loads(base64.b64decode(envelope["payload"]))
    change(payload)
    data = json.dumps(payload).encode()
    envelope["payload"] = base64.b64encode(data).decode()
    envelope["signatures"][0]["sig"] = base64.b64encode(signed.registry.sign(pae(data))).decode()
    return json.dumps(envelope).encode()


def _predicate(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda s: s["predicate"].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(_type="x"),
        lambda s: s.update(predicateType="https://model_signing/signature/v1.0"),
        lambda s: s["subject"][0].update(name="acme/other"),
        lambda s: s["subject"].append({}),
        lambda s: s["predicate"].pop("publisher"),
        _predicate(extra=1),
        _predicate(tenant="Acme"),
        _predicate(tenant="../acme"),
        _predicate(adapter=""),
        _predicate(version_number=0),
        _predicate(version_number=True),
        _predicate(version_number="3"),
        _predicate(version_digest="0" * 64),
        _predicate(base={"id": "x", "revision": "main", "module_table_digest": "a" * 64}),
        _predicate(base={"id": "\ud800", "revision": "7" * 40, "module_table_digest": "a" * 64}),
        _predicate(files=[]),
        _predicate(chunks={"size": CHUNK_BYTES, "sha256": []}),
        _predicate(chunks={"size": CHUNK_BYTES, "sha256": ["0" * 64] * 2}),
        _predicate(chunks={"size": CHUNK_BYTES, "sha256": ["x"]}),
        _predicate(chunks={"size": CHUNK_BYTES * 2, "sha256": ["0" * 64]}),
        _predicate(publisher="none"),
        _predicate(publisher="somebody"),
        _predicate(oms_root_digest=None),
        _predicate(signature_sha256=None),
        _predicate(limits_id=""),
        _predicate(policy_id="a b"),
        _predicate(allowed=["ZERO_DELTA", "SCALE_SUSPECT"]),
        _predicate(allowed=["zero"]),
        _predicate(allowed=[["ZERO_DELTA"]]),
        _predicate(manifest_digest="short"),
        _predicate(issued_at="2026-03-01T12:00:00+00:00"),
        _predicate(issued_at="2026-3-1T12:00:00Z"),
        _predicate(issued_at="2026-02-30T12:00:00Z"),
        lambda s: s["predicate"]["files"].reverse(),
        lambda s: s["predicate"]["files"][0].update(path="sub/README.md"),
        lambda s: s["predicate"]["files"][0].update(size=-1),
        lambda s: s["predicate"]["files"][0].update(size=1.5),
        lambda s: s["predicate"]["files"][0].update(sha256="F" * 64),
    ],
)  # fmt: skip
def test_a_statement_of_another_form_is_refused(signed: Signed, change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(Untrusted) as caught:
        open_statement(resigned(signed, change), [signed.registry.public])
    assert caught.value.code is Code.STATEMENT_INVALID
    assert caught.value.problem.where.startswith("admission statement")


@pytest.mark.parametrize(
    "path", ["../x", "a/b", "a\\b", ".", "..", ".hidden", "model.sig", "", "a\x00b", "c:d", "x" * 256]
)
def test_no_path_leaves_the_package(signed: Signed, path: str) -> None:
    files = (FileEntry(path, "0" * 64, 1),)
    with pytest.raises(ValueError, match=r"files|digest"):
        replace(signed.statement, files=files)


def test_a_statement_is_utc_in_seconds(signed: Signed) -> None:
    for when in (
        datetime(2026, 3, 1, 12),
        datetime(2026, 3, 1, 12, 0, 0, 5, tzinfo=UTC),
        datetime(2026, 3, 1, 12, tzinfo=timezone(timedelta(hours=1))),
    ):
        with pytest.raises(ValueError, match="issued_at"):
            replace(signed.statement, issued_at=when)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"payload": "", "payload": ""}', b" " * (3 << 20)])
def test_what_is_no_envelope(signed: Signed, data: bytes) -> None:
    for opened in (lambda: open_statement(data, [signed.registry.public]), lambda: read_unverified(data)):
        with pytest.raises(Untrusted) as caught:
            opened()
        assert caught.value.code is Code.STATEMENT_INVALID


def test_a_flipped_bit_is_found(signed: Signed) -> None:
    envelope = json.loads(signed.envelope())
    payload = base64.b64decode(envelope["payload"])
    for position in range(0, len(payload), 53):
        changed = bytearray(payload)
        changed[position] ^= 4
        envelope["payload"] = base64.b64encode(changed).decode()
        with pytest.raises(Untrusted) as caught:
            open_statement(json.dumps(envelope).encode(), [signed.registry.public])
        assert caught.value.code is Code.STATEMENT_INVALID


@given(st.binary(max_size=200))
def test_any_bytes_are_a_statement_or_an_error_of_ours(data: bytes) -> None:
    key = generate_admission_key()
    with pytest.raises(AdapterdError):
        open_statement(data, [key.public])


def test_chunks_are_4_mib_and_the_last_one_what_is_left() -> None:
    data = bytes(CHUNK_BYTES) + b"\x01" * CHUNK_BYTES + b"tail"
    wanted = tuple(sha256_hex(part) for part in (data[:CHUNK_BYTES], data[CHUNK_BYTES : 2 * CHUNK_BYTES], b"tail"))
    assert chunk_digests(BytesReader(data)) == wanted
    assert chunk_digests(BytesReader(data[: 2 * CHUNK_BYTES])) == wanted[:2]
    assert chunk_digests(BytesReader(b"")) == ()


def test_chunks_do_not_depend_on_how_the_bytes_arrive() -> None:
    data = bytes(range(256)) * (CHUNK_BYTES // 256) + b"more"
    hasher = ChunkHasher()
    for start in range(0, len(data), 1_000_003):
        hasher.update(data[start : start + 1_000_003])
    assert hasher.whole_chunks == (sha256_hex(data[:CHUNK_BYTES]),)
    assert hasher.finish() == (sha256_hex(data), chunk_digests(BytesReader(data)))
