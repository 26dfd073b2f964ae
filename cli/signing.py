"""Writing `model.sig`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adapterd.cli.credentials import write_private
from adapterd.cli.verification import read_signature
from adapterd.loader.errors import Code, Refused, Untrusted, reject
from adapterd.loader.formats.files import Package
from adapterd.loader.identity import SIGNATURE_FILE, FileEntry
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.trust import oms
from adapterd.loader.trust.keys import PrivateKey


def signable_names(package: Package) -> list[str]:
    """What a signature covers. Raises Refused (UNEXPECTED_FILE) for a folder whose files nobody has seen."""
    names = [name for name in package.names() if name != SIGNATURE_FILE]
    unseen = [name for name in names if name.endswith("/")]
    if unseen:
        hint = "A package is flat: move it out of the folder, then sign."
        raise Refused(*(reject(Code.UNEXPECTED_FILE, name, "a folder cannot be signed", hint) for name in unseen))
    return names


def sign_package(package: Package, directory: Path, entries: Sequence[FileEntry], key: PrivateKey) -> oms.OmsSignature:
    """Write `directory/model.sig` over `entries`, complete or not at all.

    A signature by the same key that already holds is kept, byte for byte: ECDSA would give another one
    each time, and an interrupted upload could not be continued.

    Args:
        package: the open folder; only its present `model.sig` is read.
        entries: all files but `model.sig`, hashed through `package`.

    Raises:
        Untrusted: KEY_UNSUPPORTED, MANIFEST_NOT_EXACT.
    """
    if SIGNATURE_FILE in package.names():
        try:
            return oms.verify(read_signature(package, DEFAULT_LIMITS), entries, [key.public])
        except Untrusted:
            pass  # somebody else's, or of other files: a new one takes its place
    bundle = oms.sign(entries, key, name=directory.resolve().name)
    write_private(directory / SIGNATURE_FILE, bundle, replace=True, mode=0o644)
    return oms.verify(bundle, entries, [key.public])
