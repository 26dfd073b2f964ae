"""A package's way in, stage by stage.

    authenticate      who sends it, and may they                       api.auth
    budget            what is declared, against the tenant's limits    budget
    receive           the bytes; the tensor file's header first        receive
    hash              the stored bytes again                           hash_files
    verify signature  one of the tenant's keys signed exactly these    verify_signature
    parse, check      the loader's verdict against the base            check
    attest            the service's own statement                      attest
    record            blobs, then one transaction with the row last    uploads.finalize
    announce          tell the log and the metrics                     uploads.finalize

A stage raises, or hands on what it found; none looks back. Until the transaction of `record` commits, an
upload is open, whatever happened to the process; after it, there is a version (I23).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import Verdict, examine
from adapterd.loader.checks.content import hash_mismatch
from adapterd.loader.checks.crew import Crew
from adapterd.loader.errors import Code, Conflict, Problem, Refused, error, reject
from adapterd.loader.formats.files import Package, file_entries, read_all
from adapterd.loader.formats.package import judge_package
from adapterd.loader.formats.safetensors_header import header_span, parse_header
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import SIGNATURE_FILE, WEIGHTS_FILE, FileEntry
from adapterd.loader.limits import Limits
from adapterd.loader.manifest import Manifest
from adapterd.loader.trust import oms
from adapterd.loader.trust.admission import NO_PUBLISHER, AdmissionStatement, issue
from adapterd.loader.trust.chunks import chunk_digests
from adapterd.loader.trust.keys import PrivateKey, PublicKey
from adapterd.registry.base_models.service import BaseModelService
from adapterd.registry.tenants.interfaces import TenantPolicy
from adapterd.registry.uploads.interfaces import NewUpload, Upload
from adapterd.registry.uploads.staging import Receiver

# The first bytes tell a tensor file from what is only named like one.
_START_BYTES = 32


@dataclass(frozen=True, slots=True)
class Hashed:
    """What the stored bytes are: all files sorted by path, and the chunk digests of the tensor file."""

    files: tuple[FileEntry, ...]
    chunks: tuple[str, ...]

    @property
    def content(self) -> tuple[FileEntry, ...]:
        """All but the signature."""
        return tuple(f for f in self.files if f.path != SIGNATURE_FILE)

    @property
    def signature(self) -> FileEntry | None:
        return next((f for f in self.files if f.path == SIGNATURE_FILE), None)


@dataclass(frozen=True, slots=True)
class Passed:
    """Everything that the stages up to `check` found out."""

    base: BaseSpec
    policy: TenantPolicy
    hashed: Hashed
    signer: oms.OmsSignature | None
    manifest: Manifest
    warnings: tuple[Problem, ...]


def budget(new: NewUpload, policy: TenantPolicy) -> None:
    """Judge what is declared: names, numbers and sizes, before a byte is taken.

    Raises:
        Refused: every name and size that is not wanted.
        Failed: REQUEST_INVALID for a code that the tenant's policy does not let an uploader allow.
    """
    for code in sorted(new.allow - policy.allow):
        raise error(
            Code.REQUEST_INVALID, "allow", f"the tenant's policy does not let uploads allow {code}",
            "Ask who keeps the tenant's policy.",
        )  # fmt: skip
    sizes = {f.path: f.size for f in new.files}
    if len(sizes) != len(new.files):
        raise error(Code.REQUEST_INVALID, "files", "a file is declared twice")
    contents = judge_package(sizes, policy.limits)
    if not contents.ok:
        raise Refused(*contents.problems)
    if contents.left_out:
        message = "is not a file that is stored"
        raise Refused(*(reject(Code.UNEXPECTED_FILE, shown(n), message, "Leave it out.") for n in contents.left_out))


def receive(receiver: Receiver, data: bytes, limits: Limits) -> None:
    """Take bytes of a file; of the tensor file nothing beyond the header before the header is judged (I7).

    Raises:
        Refused: what is wrong with the header.
        Failed: REQUEST_INVALID for more bytes than were declared.
        Unavailable: STORAGE_FULL, STORAGE_UNAVAILABLE.
    """
    receiver.expect(len(data))
    rest = memoryview(data)
    while rest:
        wanted = _until_judged(receiver, limits)
        part = rest[:wanted] if wanted else rest
        receiver.take(part)
        rest = rest[len(part) :]
        if wanted and len(part) == wanted:
            _until_judged(receiver, limits)


def hash_files(package: Package, upload: Upload) -> Hashed:
    """Hash the stored bytes. Raises Refused (HASH_MISMATCH) for each file that is not the declared one."""
    hashed = digests(package)
    declared = {f.declared.path: f.declared for f in upload.files}
    problems = [hash_mismatch(f.path, f.sha256, declared[f.path].sha256) for f in hashed.files if f != declared[f.path]]
    if problems:
        raise Refused(*problems)
    return hashed


def digests(package: Package) -> Hashed:
    """The digests of every file, and of the tensor file's chunks."""
    names = package.names()
    sizes = package.sizes()
    with Crew(sizes.get(WEIGHTS_FILE, 0)) as crew:  # two digests of every byte, side by side
        hashing = crew.call(lambda: file_entries(package, names))
        chunking = crew.call(lambda: chunk_digests(package.open(WEIGHTS_FILE)) if WEIGHTS_FILE in names else ())
        return Hashed(hashing(), chunking())


def verify_signature(
    package: Package,
    hashed: Hashed,
    policy: TenantPolicy,
    active: Sequence[PublicKey],
    revoked: Sequence[PublicKey],
) -> oms.OmsSignature | None:
    """Who signed exactly these files (I3); None only where the policy lets an upload be unsigned.

    Raises:
        Untrusted: SIGNATURE_MISSING, KEY_REVOKED, and what `oms.verify` raises. A signature that is
            there must hold, whether it is required or not.
    """
    if hashed.signature is None:
        if policy.require_signature:
            raise error(
                Code.SIGNATURE_MISSING, SIGNATURE_FILE, "the tenant's policy wants signed uploads",
                "Sign the package with `adapterctl sign`, or upload with --sign.",
            )  # fmt: skip
        return None
    signer = oms.verify(read_all(package.open(SIGNATURE_FILE)), hashed.content, [*active, *revoked])
    if signer.key_id in {key.key_id for key in revoked}:
        raise error(Code.KEY_REVOKED, SIGNATURE_FILE, f"the tenant revoked key {signer.key_id}", "Sign with another.")
    return signer


def check(package: Package, hashed: Hashed, base: BaseSpec, upload: Upload, policy: TenantPolicy) -> Verdict:
    """The loader's verdict. Raises Refused with everything that was found, warnings too, if it does not pass."""
    verdict = examine(
        package,
        base,
        limits=policy.limits,
        files=hashed.files,
        allow=upload.allow & policy.allow,
        refuse=policy.refuse,
    )
    if verdict.manifest is None:
        raise Refused(*verdict.problems)
    return verdict


def attest(upload: Upload, number: int, passed: Passed, key: PrivateKey, now: datetime) -> bytes:
    """The signed statement for version `number`."""
    signer = passed.signer
    statement = AdmissionStatement(
        tenant=upload.tenant,
        adapter=upload.adapter,
        version_number=number,
        base=passed.base.pin,
        version_digest=passed.manifest.version_digest,
        files=passed.hashed.content,
        chunks=passed.hashed.chunks,
        oms_root_digest=signer.root_digest if signer else None,
        signature_sha256=signer.bundle_sha256 if signer else None,
        publisher=signer.key_id if signer else NO_PUBLISHER,
        limits_id=passed.policy.limits_id,
        policy_id=passed.policy.policy_id,
        allowed=tuple(sorted({p.code.value for p in passed.warnings} & {c.value for c in upload.allow})),
        manifest_digest=passed.manifest.digest,
        issued_at=now.replace(microsecond=0),
    )
    return issue(statement, key)


def registered_base(base_models: BaseModelService, base_id: str, revision: str) -> BaseSpec:
    """Raises NotFound (BASE_NOT_REGISTERED): base models are everybody's, so this may be told."""
    base = base_models.get(base_id, revision)
    if base is None:
        raise error(
            Code.BASE_NOT_REGISTERED, "base", f"{base_id}@{revision} is not registered",
            "An operator adds it with `adapterctl base add`; `adapterctl base list` shows what is there.",
        )  # fmt: skip
    return base


def _until_judged(receiver: Receiver, limits: Limits) -> int:
    """How many bytes the next look at the header needs; 0 once it is judged, and for other files.

    Raises Refused for a header that is wrong.
    """
    if receiver.path != WEIGHTS_FILE or receiver.judged:
        return 0
    declared = receiver.declared_reader
    start = min(_START_BYTES, declared.size)
    if receiver.offset < start:
        return start - receiver.offset
    span = header_span(declared, limits)
    if receiver.offset < span:
        return span - receiver.offset
    parse_header(declared.read_at(0, span), declared.size, limits)
    receiver.judged = True
    return 0


def require_complete(upload: Upload) -> None:
    problems = [
        reject(
            Code.UPLOAD_INCOMPLETE, f.declared.path,
            f"bytes {f.offset} to {f.declared.size - 1} of {f.declared.size} are missing",
            f"Send the rest with Upload-Offset: {f.offset}.",
        )
        for f in upload.files
        if not f.complete
    ]  # fmt: skip
    if problems:
        raise Conflict(*problems)
