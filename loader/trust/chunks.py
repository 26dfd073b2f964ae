"""The SHA-256 of each 4 MiB of a tensor file, so that a cold load checks the bytes it packs (ARCHITECTURE.md)."""

from __future__ import annotations

import hashlib
from typing import Protocol

CHUNK_BYTES = 4 << 20
_READ_BYTES = 1 << 20


class Chunked(Protocol):
    """What can be hashed by chunks; `formats.files.FileReader` is one."""

    @property
    def size(self) -> int: ...

    def read_at(self, offset: int, length: int) -> bytes: ...


class ChunkHasher:
    """SHA-256 of a stream as a whole and of each of its 4 MiB chunks, in one pass."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._in_chunk = 0
        self._chunks: list[str] = []

    def update(self, data: bytes) -> None:
        self._whole.update(data)
        view = memoryview(data)
        while view:
            part = view[: CHUNK_BYTES - self._in_chunk]
            self._chunk.update(part)
            self._in_chunk += len(part)
            view = view[len(part) :]
            if self._in_chunk == CHUNK_BYTES:
                self._close_chunk()

    def _close_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk, self._in_chunk = hashlib.sha256(), 0

    @property
    def whole_chunks(self) -> tuple[str, ...]:
        """The chunks that are full so far."""
        return tuple(self._chunks)

    def finish(self) -> tuple[str, tuple[str, ...]]:
        """(digest of everything, all chunk digests); nothing may be added afterwards."""
        if self._in_chunk:
            self._close_chunk()
        return self._whole.hexdigest(), tuple(self._chunks)


def chunk_digests(reader: Chunked) -> tuple[str, ...]:
    """SHA-256 (hex) of each 4 MiB of a file, in order. Raises what the reader raises (ST_TRUNCATED)."""
    return tuple(_chunk_digest(reader, begin) for begin in range(0, reader.size, CHUNK_BYTES))


def _chunk_digest(reader: Chunked, begin: int) -> str:
    digest, end = hashlib.sha256(), min(begin + CHUNK_BYTES, reader.size)
    for offset in range(begin, end, _READ_BYTES):
        digest.update(reader.read_at(offset, min(_READ_BYTES, end - offset)))
    return digest.hexdigest()
