"""Writing `model.sig`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adapterd.cli.credentials import write_private
from adapterd.cli.verification import read_signature
from adapterd.loader.errors import Code, Refused, Untrusted, reject
from adapterd.loader.formats.files import BytesReader, FileReader, Package
from adapterd.loader.formats.readers import order
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
    """Write `directory/model.sig` over `entries`, complete or not at all; one that holds is kept.

    Args:
        package: the open folder; only its present `model.sig` is read.
        entries: all files but `model.sig`, hashed through `package`.

    Raises:
        Untrusted: KEY_UNSUPPORTED, MANIFEST_NOT_EXACT.
    """
    bundle = _bundle(package, entries, key, directory.resolve().name)
    write_private(directory / SIGNATURE_FILE, bundle, replace=True, mode=0o644)
    return oms.verify(bundle, entries, [key.public])


def sign_opened(package: Package, path: Path, entries: Sequence[FileEntry], key: PrivateKey) -> SignedPackage:
    """`package` with a `model.sig` over `entries`, which a folder gets, too; an archive stays as it is."""
    name = path.resolve().name
    if path.is_dir():
        sign_package(package, path, entries, key)
    else:
        name = name.split(".", maxsplit=1)[0] or name
    return SignedPackage(package, _bundle(package, entries, key, name))


def _bundle(package: Package, entries: Sequence[FileEntry], key: PrivateKey, name: str) -> bytes:
    """A signature by the same key that already holds, byte for byte, or a new one, which is the same each time.

    So an interrupted upload can be continued.
    """
    if SIGNATURE_FILE in package.names():
        try:
            present = read_signature(package, DEFAULT_LIMITS)
            oms.verify(present, entries, [key.public])
        except Untrusted:
            pass  # somebody else's, or of other files: a new one takes its place
        else:
            return present
    return oms.sign(entries, key, name=name)


class SignedPackage:
    """A package with another `model.sig`, or with one at all."""

    def __init__(self, package: Package, bundle: bytes) -> None:
        self._package = package
        self._bundle = bundle

    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self._package.names(), SIGNATURE_FILE}, key=order))

    def sizes(self) -> dict[str, int]:
        return {**self._package.sizes(), SIGNATURE_FILE: len(self._bundle)}

    def open(self, name: str) -> FileReader:
        return BytesReader(self._bundle, name) if name == SIGNATURE_FILE else self._package.open(name)
