"""One file or one package as the rest of the loader sees it: the ports, and the readers behind them."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from adapterd.loader.errors import AdapterdError, Code, Problem, Refused, error, reject
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import FileEntry

T = TypeVar("T")

HASH_BLOCK_BYTES = 1 << 20
MOST_PARTS = 1024
"""Places that one call of `preadv` fills: IOV_MAX of Linux, and POSIX promises 16."""
AGAIN = "Did the file change while it was read? Run the command again on a complete copy."


class FileReader(Protocol):
    """One regular file. `size` in bytes, fixed when it was opened."""

    @property
    def size(self) -> int: ...

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises Refused (ST_TRUNCATED) where the file ends before."""
        ...


class Package(Protocol):
    """Named files; POSIX paths. A folder that was not looked into stands in `names` with a final slash."""

    def names(self) -> tuple[str, ...]:
        """All names, sorted by their bytes."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes per name, a folder's being 0; nothing is opened for it."""
        ...

    def open(self, name: str) -> FileReader:
        """Raises KeyError for a name that is not there."""
        ...


class DescriptorReader:
    """A FileReader over an open descriptor, which it owns."""

    def __init__(self, descriptor: int, name: str) -> None:
        """Raises Refused (ARCHIVE_SPECIAL_FILE), and closes, where the descriptor is of no regular file."""
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise Refused(special(name))
        self._descriptor = descriptor
        self._name = name
        self._size = found.st_size
        self._modified = found.st_mtime_ns

    @property
    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, length: int) -> bytes:
        parts: list[bytes] = []
        while length > 0:
            part = self._read(offset, length)
            if not part:
                raise error(Code.ST_TRUNCATED, shown(self._name), f"ends {length} bytes too early", AGAIN)
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, offset: int, target: memoryview) -> None:
        """As `read_at`, into memory of the caller's: fresh memory for every large read costs as much as the read."""
        self.read_parts(offset, (target,))

    def read_parts(self, offset: int, parts: Sequence[memoryview]) -> None:
        """As `read_into`, into several places, one after the other: in one call of the system's for many of them."""
        left = [part for part in parts if part]
        while left:
            got = self._checked(partial(os.preadv, self._descriptor, left[:MOST_PARTS], offset))
            if not got:
                raise error(Code.ST_TRUNCATED, shown(self._name), f"ends {sum(map(len, left))} bytes too early", AGAIN)
            offset += got
            left = behind(left, got)

    def _read(self, offset: int, length: int) -> bytes:
        return self._checked(partial(os.pread, self._descriptor, length, offset))

    def _checked(self, read: Callable[[], T]) -> T:
        """What was written into the file since it was opened is never mixed with what was read before."""
        try:
            part = read()
            found = os.fstat(self._descriptor)
        except OSError as failure:
            raise unreadable(self._name, failure) from None
        if part and (found.st_size, found.st_mtime_ns) != (self._size, self._modified):
            raise error(Code.FILE_CHANGED, shown(self._name), "changed while it was read", AGAIN)
        return part

    def close(self) -> None:
        """Nothing can be read afterwards."""
        os.close(self._descriptor)


class BytesReader:
    """A FileReader over bytes in memory: entries of archives, bodies of requests."""

    def __init__(self, data: bytes, name: str = "") -> None:
        self._data = data
        self._name = name

    @property
    def size(self) -> int:
        return len(self._data)

    def read_at(self, offset: int, length: int) -> bytes:
        part = self._data[offset : offset + length]
        if len(part) != length:
            raise error(Code.ST_TRUNCATED, self._name, f"{length} bytes expected at {offset}, {len(part)} are there")
        return part


def read_all(reader: FileReader) -> bytes:
    """The whole file; for small ones, whose size the caller has checked."""
    return reader.read_at(0, reader.size)


def read_into(reader: FileReader, offset: int, target: memoryview) -> None:
    """Fill `target` from `offset` on. Raises what `read_at` raises."""
    if isinstance(reader, DescriptorReader):
        reader.read_into(offset, target)
    else:
        target[:] = reader.read_at(offset, len(target))


def read_parts(reader: FileReader, offset: int, parts: Sequence[memoryview]) -> None:
    """Fill `parts`, which follow each other in the file, from `offset` on. Raises what `read_at` raises."""
    if isinstance(reader, DescriptorReader):
        reader.read_parts(offset, parts)
        return
    data, done = memoryview(reader.read_at(offset, sum(map(len, parts)))), 0
    for part in parts:
        part[:] = data[done : done + len(part)]
        done += len(part)


def behind(parts: Sequence[memoryview], got: int) -> list[memoryview]:
    """What is left of `parts` behind their first `got` bytes."""
    index = 0
    while index < len(parts) and got >= len(parts[index]):
        got -= len(parts[index])
        index += 1
    rest = list(parts[index:])
    if got:
        rest[0] = rest[0][got:]
    return rest


def blocks(reader: FileReader, size: int = HASH_BLOCK_BYTES) -> Iterator[bytes]:
    """The file in order, `size` bytes at a time."""
    for offset in range(0, reader.size, size):
        yield reader.read_at(offset, min(size, reader.size - offset))


def file_entries(
    package: Package, names: Iterable[str] | None = None, progress: Callable[[int], None] | None = None
) -> tuple[FileEntry, ...]:
    """SHA-256 and size of `names` (None: every file), sorted by the bytes of path.

    Args:
        progress: called with the number of bytes hashed since the last call.
    """
    wanted = [n for n in package.names() if not n.endswith("/")] if names is None else list(names)
    return tuple(_entry(package.open(name), name, progress) for name in sorted(wanted, key=order))


def _entry(reader: FileReader, name: str, progress: Callable[[int], None] | None) -> FileEntry:
    digest = hashlib.sha256()
    for block in blocks(reader):
        digest.update(block)
        if progress is not None:
            progress(len(block))
    return FileEntry(name, digest.hexdigest(), reader.size)


def special(full: str) -> Problem:
    return reject(Code.ARCHIVE_SPECIAL_FILE, shown(full), "is neither a file nor a folder")


def unreadable(where: str, failure: OSError) -> AdapterdError:
    return error(
        Code.PATH_NOT_FOUND, shown(where), f"cannot be read: {failure.strerror or 'input/output error'}",
        "Name a folder that holds adapter_config.json and adapter_model.safetensors.",
    )  # fmt: skip


def order(name: str) -> bytes:
    return name.encode("utf-8")
