"""A publisher and a registry in one, over a folder: what `FolderSource` serves and a worker can verify."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import examine
from adapterd.loader.formats.files import DirectoryPackage, file_entries
from adapterd.loader.identity import SIGNATURE_FILE, WEIGHTS_FILE
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.sources import FolderSource
from adapterd.loader.trust import oms
from adapterd.loader.trust.admission import AdmissionStatement, chunk_digests, issue
from adapterd.loader.trust.keys import generate_admission_key, generate_publisher_key
from adapterd.loader.trust.policy import TrustStore
from fakes.packages import WrittenPackage, write_package

NOW = datetime(2026, 11, 1, tzinfo=UTC)


class FolderPublisher:
    """Writes, signs, examines and admits packages under `root`; `trust` trusts both of its keys."""

    def __init__(self, root: Path, base: BaseSpec) -> None:
        self.base = base
        self.root = root
        self.source = FolderSource(root)
        self.trust = TrustStore()
        self._key, self._admission = generate_publisher_key(), generate_admission_key()
        self.trust.add_admission_key(self._admission.public)

    def publish(self, tenant: str, name: str, number: int = 1, **package: object) -> WrittenPackage:
        """One version, with the alias `default` on it; `package` as of `write_package`."""
        if tenant not in self.trust.tenants:
            self.trust.add_publisher_key(tenant, self._key.public)
        folder = self.root / tenant / name / str(number)
        written = write_package(folder, base=self.base, **package)  # type: ignore[arg-type]
        (folder / SIGNATURE_FILE).write_bytes(self._admit(folder, tenant, name, number))
        (folder.parent / "aliases.json").write_text(json.dumps({"default": number}))
        return written

    def _admit(self, folder: Path, tenant: str, name: str, number: int) -> bytes:
        with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as opened:
            files = file_entries(opened)
            chunks = chunk_digests(opened.open(WEIGHTS_FILE))
            verdict = examine(opened, self.base, files=files)
        assert verdict.manifest is not None, verdict.problems
        signature = oms.sign(files, self._key, name=name)
        signed = oms.verify(signature, files, [self._key.public])
        statement = AdmissionStatement(
            tenant=tenant, adapter=name, version_number=number, base=self.base.pin,
            version_digest=verdict.manifest.version_digest, files=files, chunks=chunks,
            oms_root_digest=signed.root_digest, signature_sha256=signed.bundle_sha256,
            publisher=signed.key_id, limits_id="tests", policy_id="tests", allowed=(),
            manifest_digest=verdict.manifest.digest, issued_at=NOW,
        )  # fmt: skip
        (folder.parent / f"{number}.admission.dsse.json").write_bytes(issue(statement, self._admission))
        return signature
