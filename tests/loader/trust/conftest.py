"""A small signed version to take apart: keys, files, statement, bundle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pytest

from adapterd.loader.identity import BasePin, FileEntry, sha256_hex, version_digest
from adapterd.loader.trust import oms
from adapterd.loader.trust.admission import AdmissionStatement, issue
from adapterd.loader.trust.keys import PrivateKey, generate_admission_key, generate_publisher_key
from adapterd.loader.trust.policy import TrustStore
from adapterd.loader.trust.verify import Wanted

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
PIN = BasePin("tests/tiny-llama", "7" * 40, "a" * 64)
CONTENT = {
    "README.md": b"# hello\n",
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"weights" * 9,
}


def entries(content: dict[str, bytes]) -> tuple[FileEntry, ...]:
    """What a package of these files would be listed as."""
    return tuple(FileEntry(name, sha256_hex(data), len(data)) for name, data in sorted(content.items()))


@dataclass
class Signed:
    """One version of acme/finance, signed by `publisher` and admitted by `registry`."""

    publisher: PrivateKey = field(default_factory=generate_publisher_key)
    registry: PrivateKey = field(default_factory=generate_admission_key)
    files: tuple[FileEntry, ...] = entries(CONTENT)

    def __post_init__(self) -> None:
        self.bundle = oms.sign(self.files, self.publisher, name="finance")
        held = oms.verify(self.bundle, self.files, [self.publisher.public])
        self.statement = AdmissionStatement(
            tenant="acme",
            adapter="finance",
            version_number=3,
            base=PIN,
            version_digest=version_digest(self.files),
            files=self.files,
            chunks=(sha256_hex(CONTENT["adapter_model.safetensors"]),),
            oms_root_digest=held.root_digest,
            signature_sha256=held.bundle_sha256,
            publisher=held.key_id,
            limits_id="limits-1",
            policy_id="policy-1",
            allowed=(),
            manifest_digest="b" * 64,
            issued_at=NOW,
        )
        self.wanted = Wanted("acme", "finance", PIN, self.statement.version_digest, 3)

    def envelope(self, **changes: object) -> bytes:
        return issue(replace(self.statement, **changes), self.registry)  # type: ignore[arg-type]

    def unsigned(self, **changes: object) -> bytes:
        return self.envelope(oms_root_digest=None, signature_sha256=None, publisher="none", **changes)

    def trust(self) -> TrustStore:
        store = TrustStore()
        store.add_admission_key(self.registry.public, "registry")
        store.add_publisher_key("acme", self.publisher.public, "acme's build server")
        return store


@pytest.fixture
def signed() -> Signed:
    return Signed()
