"""The trust core: bytes and a clock in, trusted facts or an error out. No file, no network.

The steps have one order, and only what passed is kept:

    checking = TrustedVersion(wanted, trust, now)
    checking.update_statement(data)        # 1  a trusted registry signed it, and it is about what was asked
    checking.update_signature(data|None)   # 2  a trusted publisher signed exactly the statement's files
    checking.update_files(files, chunks)   # 3  the bytes that arrived are those files
    checking.files_were_marked()           # 3' or they were, once, and chunks are checked when packed
    checking.update_manifest(digest)       # 4  and mean what was admitted

A step out of order is a `RuntimeError`: our own mistake. Data that does not hold is `Untrusted` or
`Refused`. Revocation is looked up in the trust store that was given, so a key that was revoked after a
download refuses the next load. The shape follows python-tuf's `trusted_metadata_set.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from adapterd.loader.errors import Code, error
from adapterd.loader.identity import SIGNATURE_FILE, WEIGHTS_FILE, BasePin, FileEntry
from adapterd.loader.trust.admission import CHUNK_BYTES, NO_PUBLISHER, AdmissionStatement
from adapterd.loader.trust.oms import OmsSignature
from adapterd.loader.trust.policy import TrustedKey, TrustStore
from adapterd.loader.trust.seen import Seen

# A statement from the future: one of the two clocks is wrong, and revocation dates would mean nothing.
MAX_CLOCK_SKEW = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for. `version_number` is None where nobody named one."""

    tenant: str
    adapter: str
    base: BasePin
    version_digest: str
    version_number: int | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """What steps 1 and 2 established.

    Attributes:
        statement: signed by a trusted admission key, and about what was wanted.
        admission_key_id: of that key.
        signature: the publisher's, or None where the policy lets versions be unsigned.
    """

    statement: AdmissionStatement
    admission_key_id: str
    signature: OmsSignature | None


class TrustedVersion:
    """One version on its way to be trusted; see the module."""

    def __init__(self, wanted: Wanted, trust: TrustStore, now: datetime, seen: Seen | None = None) -> None:
        """Args: seen: remembers what held, for versions that are checked again and again."""
        if now.utcoffset() is None:
            raise ValueError("now must carry its time zone")
        self._wanted = wanted
        self._trust = trust
        self._now = now
        self._seen = seen or Seen()
        self._statement: tuple[AdmissionStatement, str] | None = None
        self._checked: Checked | None = None
        self._files_hold = False
        self._manifest_holds = False

    # --- the steps

    def update_statement(self, data: bytes) -> AdmissionStatement:
        """Step 1.

        Raises:
            Untrusted: TRUST_NOT_CONFIGURED, KEY_UNKNOWN, KEY_REVOKED, STATEMENT_INVALID, STATEMENT_MISMATCH.
            RuntimeError: the statement is there already.
        """
        if self._statement is not None:
            raise RuntimeError("the statement has been taken already")
        keys = self._trust.admission_keys
        if not keys:
            raise error(
                Code.TRUST_NOT_CONFIGURED, "admission keys", "the trust file lists no admission key",
                "`adapterctl trust add-key PEM --admission`; the operator has the PEM, and so has /v1/admission-keys.",
            )  # fmt: skip
        statement, key_id = self._seen.statement(data, [k.key for k in keys])
        _refuse_revoked(keys, key_id, "admission statement")
        self._check_asked(statement)
        self._statement = (statement, key_id)
        return statement

    def update_signature(self, data: bytes | None) -> Checked:
        """Step 2: the publisher's signature over the statement's files, or None if there is no `model.sig`.

        A signature that is there must hold, even where the tenant's policy does not ask for one.

        Raises:
            Untrusted: SIGNATURE_MISSING, SIGNATURE_MALFORMED, SIGNATURE_INVALID, KEY_UNKNOWN, KEY_REVOKED,
                MANIFEST_NOT_EXACT, STATEMENT_MISMATCH.
            RuntimeError: no statement yet, or the signature is there already.
        """
        if self._statement is None or self._checked is not None:
            raise RuntimeError("the signature comes after the statement, once")
        statement, key_id = self._statement
        signature = None if data is None else self._check_publisher(statement, data)
        if signature is None:
            self._check_unsigned(statement)
        self._checked = Checked(statement, key_id, signature)
        return self._checked

    def update_files(self, files: Iterable[FileEntry], chunks: Sequence[str]) -> None:
        """Step 3: digests and sizes of the bytes that arrived, and the chunk list of the tensor file.

        Raises:
            Refused: HASH_MISMATCH; MANIFEST_NOT_EXACT is Untrusted: a file too many or too few.
            Untrusted: CHUNK_MISMATCH.
            RuntimeError: out of order.
        """
        statement = self.checked.statement
        if self._files_hold:
            raise RuntimeError("the files have been taken already")
        found = {f.path: f for f in files if f.path != SIGNATURE_FILE}
        _check_files({f.path: f for f in statement.files}, found)
        for index, chunk in enumerate(chunks):
            check_chunk(statement, index, chunk)
        if len(chunks) != len(statement.chunks):
            message = f"{len(chunks)} chunks, {len(statement.chunks)} were admitted"
            raise error(Code.CHUNK_MISMATCH, WEIGHTS_FILE, message)
        self._files_hold = True

    def files_were_marked(self) -> None:
        """Step 3 of a version that passed it on this host before and carries the mark.

        Its bytes are not believed for that: `pack` checks each chunk that it packs.

        Raises:
            RuntimeError: out of order.
        """
        if self._checked is None or self._files_hold:
            raise RuntimeError("the files come after the signature, once")
        self._files_hold = True

    def update_manifest(self, digest: str) -> None:
        """Step 4: the digest of the manifest that this program read out of the files.

        Raises:
            Untrusted: STATEMENT_MISMATCH.
            RuntimeError: out of order.
        """
        if not self._files_hold or self._manifest_holds:
            raise RuntimeError("the manifest comes after the files, once")
        admitted = self.checked.statement.manifest_digest
        if digest != admitted:
            raise error(
                Code.STATEMENT_MISMATCH, "manifest digest",
                f"{admitted} was admitted, these files give {digest}",
                "This program and the registry read the files differently; are they of different releases?",
            )  # fmt: skip
        self._manifest_holds = True

    # --- what is trusted

    @property
    def checked(self) -> Checked:
        """After step 2. Raises RuntimeError before."""
        if self._checked is None:
            raise RuntimeError("nothing is checked yet")
        return self._checked

    @property
    def complete(self) -> bool:
        """All four steps passed."""
        return self._manifest_holds

    # --- rules

    def _check_asked(self, s: AdmissionStatement) -> None:
        w = self._wanted
        pairs: list[tuple[str, object, object]] = [
            ("tenant", w.tenant, s.tenant),
            ("adapter", w.adapter, s.adapter),
            ("base id", w.base.id, s.base.id),
            ("base revision", w.base.revision, s.base.revision),
            ("base module table", w.base.module_table_digest, s.base.module_table_digest),
            ("version digest", w.version_digest, s.version_digest),
        ]
        if w.version_number is not None:
            pairs.append(("version number", w.version_number, s.version_number))
        for name, wanted, found in pairs:
            if wanted != found:
                raise error(
                    Code.STATEMENT_MISMATCH, name,
                    f"{wanted} was asked for, the admission statement is about {found}",
                    "The registry handed out the statement of something else; nothing was loaded.",
                )  # fmt: skip
        if s.issued_at > self._now + MAX_CLOCK_SKEW:
            raise error(
                Code.STATEMENT_INVALID, "issued_at", f"{s.issued_at:%Y-%m-%dT%H:%M:%SZ} lies in the future",
                "Check the clocks of this host and of the registry.",
            )  # fmt: skip

    def _check_publisher(self, statement: AdmissionStatement, data: bytes) -> OmsSignature:
        publishers = self._trust.tenant(statement.tenant).publishers
        signature = self._seen.signature(data, statement.files, [k.key for k in publishers])
        _refuse_revoked(publishers, signature.key_id, SIGNATURE_FILE)
        for name, wanted, found in [
            ("publisher", statement.publisher, signature.key_id),
            ("OMS root digest", statement.oms_root_digest, signature.root_digest),
            ("SHA-256 of model.sig", statement.signature_sha256, signature.bundle_sha256),
        ]:
            if wanted != found:
                raise error(Code.STATEMENT_MISMATCH, name, f"the statement says {wanted}, model.sig gives {found}")
        return signature

    def _check_unsigned(self, statement: AdmissionStatement) -> None:
        if statement.publisher != NO_PUBLISHER:
            raise error(
                Code.SIGNATURE_MISSING, SIGNATURE_FILE,
                f"publisher {statement.publisher} signed it, but the signature is not there",
                "The source withholds it; fetch the version again or from another source.",
            )  # fmt: skip
        if self._trust.tenant(statement.tenant).require_publisher:
            raise error(
                Code.SIGNATURE_MISSING, SIGNATURE_FILE,
                f"no publisher signed this version, and tenant {statement.tenant} requires it",
                "Have it signed (`adapterctl sign`), or let the trust file allow unsigned versions of it.",
            )  # fmt: skip


def verify_version(
    wanted: Wanted, statement: bytes, signature: bytes | None, trust: TrustStore, now: datetime
) -> Checked:
    """Steps 1 and 2 in one call: everything that can be decided without the files. Raises as they do."""
    checking = TrustedVersion(wanted, trust, now)
    checking.update_statement(statement)
    return checking.update_signature(signature)


def check_chunk(statement: AdmissionStatement, index: int, found: str) -> None:
    """Raises Untrusted (CHUNK_MISMATCH) unless chunk `index` of the tensor file has the admitted digest."""
    if index >= len(statement.chunks) or statement.chunks[index] != found:
        raise error(
            Code.CHUNK_MISMATCH, f"{WEIGHTS_FILE}[{index * CHUNK_BYTES}:]",
            f"chunk {index} is not the one that was admitted",
        )  # fmt: skip


def check_file(wanted: FileEntry, found: FileEntry) -> None:
    """Raises Refused (HASH_MISMATCH) unless size and digest are the admitted ones."""
    if wanted.size != found.size:
        raise error(Code.HASH_MISMATCH, wanted.path, f"{found.size} bytes, {wanted.size} were admitted")
    if wanted.sha256 != found.sha256:
        raise error(Code.HASH_MISMATCH, wanted.path, f"SHA-256 {found.sha256}, {wanted.sha256} was admitted")


def _check_files(wanted: dict[str, FileEntry], found: dict[str, FileEntry]) -> None:
    for path in sorted(wanted.keys() ^ found.keys()):
        word = "was admitted, but is not there" if path in wanted else "is there, but was not admitted"
        raise error(Code.MANIFEST_NOT_EXACT, path, f"this file {word}")
    for path, entry in wanted.items():
        check_file(entry, found[path])


def _refuse_revoked(keys: Iterable[TrustedKey], key_id: str, where: str) -> None:
    if any(k.revoked and k.key.key_id == key_id for k in keys):
        raise error(
            Code.KEY_REVOKED, where, f"signed by key {key_id}, which is revoked",
            "Have the version signed again with a key that is in use.",
        )  # fmt: skip
