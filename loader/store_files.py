"""What lies in a version's folder on this disk, against what was admitted."""

from __future__ import annotations

from adapterd.loader.download import Progress
from adapterd.loader.errors import Code, error
from adapterd.loader.formats.files import DirectoryPackage, blocks
from adapterd.loader.identity import WEIGHTS_FILE, FileEntry
from adapterd.loader.trust.admission import AdmissionStatement
from adapterd.loader.trust.chunks import ChunkHasher


def check_sizes(package: DirectoryPackage, statement: AdmissionStatement) -> None:
    """Raises Untrusted (MANIFEST_NOT_EXACT) or Refused (HASH_MISMATCH)."""
    found = package.sizes()
    wanted = {f.path: f.size for f in statement.files}
    for name in sorted(found.keys() ^ wanted.keys()):
        raise error(Code.MANIFEST_NOT_EXACT, name, "the stored files are not those that were admitted")
    for name, size in wanted.items():
        if found[name] != size:
            raise error(Code.HASH_MISMATCH, name, f"{found[name]} bytes, {size} were admitted")


def hash_package(package: DirectoryPackage, progress: Progress) -> tuple[list[FileEntry], tuple[str, ...]]:
    """All files, and the chunks of the tensor file, in one pass."""
    found: list[FileEntry] = []
    chunks: tuple[str, ...] = ()
    for name in package.names():
        reader, hasher = package.open(name), ChunkHasher()
        for block in blocks(reader):
            hasher.update(block)
            progress(len(block))
        digest, listed = hasher.finish()
        found.append(FileEntry(name, digest, reader.size))
        chunks = listed if name == WEIGHTS_FILE else chunks
    return found, chunks
