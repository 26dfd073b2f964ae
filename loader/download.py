"""From a source to a file: counted, hashed and compared while it is written, resumed when it breaks off."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from adapterd.loader.errors import Code, Unavailable, error
from adapterd.loader.identity import WEIGHTS_FILE, FileEntry
from adapterd.loader.sources.interface import Resolved, Source
from adapterd.loader.trust.admission import AdmissionStatement
from adapterd.loader.trust.chunks import ChunkHasher
from adapterd.loader.trust.verify import check_chunk, check_file

# A connection that breaks this often for one file is a source that does not work.
MAX_BREAKS = 16

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the bytes of one version come from."""

    source: Source
    version: Resolved


def receive(
    origin: Origin,
    statement: AdmissionStatement,
    wanted: FileEntry,
    target: Path,
    progress: Progress,
) -> tuple[FileEntry, tuple[str, ...]]:
    """Write one file to `target`, which must not exist, and make it durable.

    Not a byte more than the statement says is written, whatever the source sends. The tensor file is
    given up at its first bad chunk.

    Args:
        progress: called with the number of bytes that arrived since the last call.

    Returns:
        What was written, and its chunk digests.

    Raises:
        Refused: HASH_MISMATCH. Untrusted: CHUNK_MISMATCH. Unavailable, OSError.
    """
    hasher = ChunkHasher()
    checked = 0
    with target.open("xb") as file, closing(_blocks(origin, wanted)) as blocks:
        for block in blocks:
            file.write(block)
            hasher.update(block)
            if wanted.path == WEIGHTS_FILE:
                checked = _check_chunks(statement, hasher.whole_chunks, checked)
            progress(len(block))
        file.flush()
        os.fsync(file.fileno())
    digest, chunks = hasher.finish()
    found = FileEntry(wanted.path, digest, target.stat().st_size)
    check_file(wanted, found)
    return found, chunks


def _check_chunks(statement: AdmissionStatement, chunks: tuple[str, ...], checked: int) -> int:
    for index in range(checked, len(chunks)):
        check_chunk(statement, index, chunks[index])
    return len(chunks)


def _blocks(origin: Origin, wanted: FileEntry) -> Generator[bytes, None, None]:
    """Exactly `wanted.size` bytes, over as many connections as it takes."""
    got = breaks = 0
    while got < wanted.size:
        before = got
        try:
            with origin.source.read(origin.version, wanted.path, got) as blocks:
                for block in blocks:
                    part = block[: wanted.size - got]
                    got += len(part)
                    yield part
                    if got == wanted.size:
                        return
        except Unavailable:
            breaks += 1
            if got == before or breaks > MAX_BREAKS:
                raise
        else:
            breaks += 1
            if got == before or breaks > MAX_BREAKS:
                raise _ended(wanted, got)


def _ended(wanted: FileEntry, got: int) -> Exception:
    return error(
        Code.SERVER_ERROR, wanted.path, f"the source ends this file after {got} of {wanted.size} bytes",
        "Try again later; if it stays so, the stored file is damaged.",
    )  # fmt: skip
