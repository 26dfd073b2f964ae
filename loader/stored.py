"""What the verified store hands out, and which base it may be for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adapterd.loader.errors import Code, error
from adapterd.loader.identity import BasePin, VersionKey
from adapterd.loader.manifest import Manifest
from adapterd.loader.trust.admission import AdmissionStatement
from adapterd.loader.trust.verify import Checked


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version that may be packed.

    Attributes:
        key: its identity.
        directory: holds exactly the statement's files.
        manifest: read from those files just now, and equal to the admitted one.
        statement, checked: what was verified just now.
        source: whether its bytes were fetched by this call or were here already.
    """

    key: VersionKey
    directory: Path
    manifest: Manifest
    checked: Checked
    source: Literal["downloaded", "disk"]

    @property
    def statement(self) -> AdmissionStatement:
        return self.checked.statement


def check_pin(version: BasePin, served: BasePin) -> None:
    """Raises Refused (BASE_MISMATCH, BASE_REVISION_MISMATCH) unless the version is for the served base."""
    for code, field in [
        (Code.BASE_MISMATCH, "id"),
        (Code.BASE_REVISION_MISMATCH, "revision"),
        (Code.BASE_MISMATCH, "module_table_digest"),
    ]:
        wanted, found = getattr(version, field), getattr(served, field)
        if wanted != found:
            message = f"the version is for {wanted}, the base model that is served has {found}"
            raise error(code, f"base.{field}", message, "Ask for a version for this base model.")
