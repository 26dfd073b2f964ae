"""A scratch file without a name, and parts of files as files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from adapterd.loader.disk import FULL
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.formats.readers import FileReader
from adapterd.loader.formats.text import shown

Write = Callable[[int, bytes | memoryview], int]


class SliceReader:
    """A FileReader over a part of another one."""

    def __init__(self, source: FileReader, offset: int, size: int, name: str) -> None:
        self._source = source
        self._offset = offset
        self._size = size
        self._name = name

    @property
    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, length: int) -> bytes:
        if offset < 0 or offset + length > self._size:
            raise error(Code.ST_TRUNCATED, shown(self._name), f"ends {offset + length - self._size} bytes too early")
        return self._source.read_at(self._offset + offset, length)


class Spool:
    """Bytes on disk that nobody can open by a name and that are gone with the process, even one that is killed.

    Args:
        write: how bytes get to a file descriptor (`os.write`); may write less than it is given.
    """

    def __init__(self, write: Write = os.write) -> None:
        self._write = write
        self._descriptor = -1
        self.size = 0

    def append(self, data: bytes) -> None:
        """Raises Unavailable (STORAGE_FULL, STORAGE_UNAVAILABLE)."""
        rest = memoryview(data)
        try:
            if self._descriptor < 0:
                self._descriptor = _nameless()
            while rest:
                rest = rest[self._write(self._descriptor, rest) :]
        except OSError as failure:
            raise _no_room(failure) from None
        self.size += len(data)

    def reader(self, offset: int, size: int, name: str) -> SliceReader:
        """A part of what has been appended."""
        return SliceReader(self, offset, size, name)

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes, which have been appended. Raises Unavailable (STORAGE_UNAVAILABLE)."""
        parts = bytearray()
        while len(parts) < length:
            try:
                part = os.pread(self._descriptor, length - len(parts), offset + len(parts))
            except OSError as failure:
                raise _no_room(failure) from None
            assert part, "nobody else can shorten a file without a name"
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """Nothing is left of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _nameless() -> int:
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


def _no_room(failure: OSError) -> AdapterdError:
    if failure.errno in FULL:
        return error(
            Code.STORAGE_FULL, "temporary folder", "no room to unpack the archive",
            "Free some space, or set TMPDIR to a folder on a larger disk.",
        )  # fmt: skip
    words = failure.strerror or str(failure)
    return error(
        Code.STORAGE_UNAVAILABLE, "temporary folder", f"the archive cannot be unpacked: {words}",
        "Set TMPDIR to a folder that can be written.",
    )  # fmt: skip
