"""Which key signed which bytes, remembered: to open a statement anew takes longer than all else that a cold load asks.

That a signature is a key's over these bytes, and what the bytes say, cannot change. Whether that key is trusted,
for what and for whom, can: so what is remembered counts only as long as the key is among those that are given, and
whoever asks looks for revocations, names and times himself, each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from adapterd.loader.identity import FileEntry
from adapterd.loader.recent import Recent
from adapterd.loader.trust.admission import AdmissionStatement, open_signed
from adapterd.loader.trust.keys import PublicKey
from adapterd.loader.trust.oms import OmsSignature
from adapterd.loader.trust.oms import verify as verify_oms

MOST_BYTES = 16 << 20
"""Of statements and of bundles, each: of an adapter of 84 MB they have 4 and 2 KB."""


class Seen:
    """Statements and publishers' signatures that held once. For any thread."""

    def __init__(self) -> None:
        self._statements: Recent[bytes, tuple[AdmissionStatement, str]] = Recent(MOST_BYTES)
        self._signatures: Recent[tuple[bytes, tuple[FileEntry, ...]], OmsSignature] = Recent(MOST_BYTES)

    def statement(self, envelope: bytes, keys: Sequence[PublicKey]) -> tuple[AdmissionStatement, str]:
        """As `admission.open_signed`."""
        at = hashlib.sha256(envelope).digest()
        found = self._statements.get(at)
        if found is None or not _among(found[1], keys):
            found = open_signed(envelope, keys)
            self._statements.keep(at, found, len(envelope))
        return found

    def signature(self, bundle: bytes, files: tuple[FileEntry, ...], keys: Sequence[PublicKey]) -> OmsSignature:
        """As `oms.verify`."""
        at = hashlib.sha256(bundle).digest(), files
        found = self._signatures.get(at)
        if found is None or not _among(found.key_id, keys):
            found = verify_oms(bundle, files, keys)
            self._signatures.keep(at, found, len(bundle))
        return found


def _among(key_id: str, keys: Sequence[PublicKey]) -> bool:
    return any(key.key_id == key_id for key in keys)
