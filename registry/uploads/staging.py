"""Bytes of open uploads on the local disk, each file under its number: a name is never a path (I6).

The length of a staged file is the offset that a client resumes at, so an interrupted transfer needs no
bookkeeping, and a kill loses nothing that was written.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from adapterd.loader.disk import FULL, require_writable
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.registry.uploads.interfaces import OffsetMismatch, UploadFile

Write = Callable[[int, bytes | memoryview], int]


class StagingArea:
    """The folder `root/<upload id>/<position>`.

    Args:
        root: made when first needed, 0700.
        write: how bytes get to a file descriptor (`os.write`); may write less than it is given.
    """

    def __init__(self, root: Path, write: Write = os.write) -> None:
        self._root = root
        self._write = write

    def check(self) -> None:
        """Returns if files can be made here. Raises Unavailable."""
        with _narrowed():
            require_writable(self._root)

    def offset(self, upload_id: str, position: int) -> int:
        """Bytes received of one file; 0 if none, or if the folder is gone."""
        with _narrowed():
            try:
                return self._path(upload_id, position).stat().st_size
            except FileNotFoundError:
                return 0

    @contextmanager
    def receiver(self, upload_id: str, file: UploadFile, offset: int) -> Iterator[Receiver]:
        """Take more bytes of one file, starting at `offset`; what was written stays, also after an error.

        Raises:
            Conflict: OFFSET_MISMATCH; CONFLICT while another request writes the same file.
            Unavailable: STORAGE_FULL, STORAGE_UNAVAILABLE.
        """
        path = self._path(upload_id, file.position)
        with _narrowed():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with _narrowed():
                _lock(fd, file.declared.path)
            here = os.fstat(fd).st_size
            if here != offset:
                raise OffsetMismatch(file.declared.path, here, offset)
            yield Receiver(fd, file, here, self._write)
        finally:
            os.close(fd)

    @contextmanager
    def package(self, upload_id: str, files: Sequence[UploadFile]) -> Iterator[StagedPackage]:
        """The staged files as a `loader` package; every file is opened once and stays open.

        Raises FileNotFoundError when a file is not there (any more), and Unavailable.
        """
        with ExitStack() as stack:
            opened = {}
            for file in files:
                # Nobody sends the bytes of an empty file, so it may have to be made here.
                create = 0 if file.declared.size else os.O_CREAT
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | create
                with _narrowed(but=FileNotFoundError):
                    fd = os.open(self._path(upload_id, file.position), flags, 0o600)
                stack.callback(os.close, fd)
                opened[file.declared.path] = StagedFile(fd, file.declared.path, os.fstat(fd).st_size)
            yield StagedPackage(opened)

    def path(self, upload_id: str, file: UploadFile) -> Path:
        """Where the bytes of a file lie."""
        return self._path(upload_id, file.position)

    def remove(self, upload_id: str) -> None:
        """Remove everything of an upload; nothing to do is fine."""
        shutil.rmtree(self._root / upload_id, ignore_errors=True)

    def ids(self) -> frozenset[str]:
        """The uploads that have a folder here."""
        with _narrowed():
            try:
                return frozenset(p.name for p in self._root.iterdir())
            except FileNotFoundError:
                return frozenset()

    def _path(self, upload_id: str, position: int) -> Path:
        return self._root / upload_id / str(position)


class Receiver:
    """Takes the bytes of one file, never more than were declared.

    Attributes:
        offset: bytes of the file on disk.
        judged: whether somebody has found that the rest of the file may come.
    """

    def __init__(self, fd: int, file: UploadFile, offset: int, write: Write) -> None:
        self._fd = fd
        self._file = file
        self._write = write
        self.offset = offset
        self.judged = False

    @property
    def path(self) -> str:
        """The file's declared name."""
        return self._file.declared.path

    @property
    def declared_reader(self) -> StagedFile:
        """The file as it is going to be: its declared size, with only the received bytes to be read."""
        return StagedFile(self._fd, self.path, self._file.declared.size)

    def expect(self, length: int) -> None:
        """Refuse a body of `length` bytes that would go past the declared size. Raises Failed."""
        declared = self._file.declared
        if self.offset + length > declared.size:
            raise error(
                Code.REQUEST_INVALID, declared.path,
                f"the body goes past the declared {declared.size} bytes",
                "Start a new upload with the right sizes.",
            )  # fmt: skip

    def take(self, data: bytes | memoryview) -> None:
        """Append `data`; `offset` tells what was kept.

        Raises:
            Failed: as `expect`.
            Conflict: CONFLICT when the upload was closed meanwhile: what a removed file takes counts nowhere.
            Unavailable: STORAGE_FULL, STORAGE_UNAVAILABLE.
        """
        self.expect(len(data))
        rest = memoryview(data)
        with _narrowed():
            if os.fstat(self._fd).st_nlink == 0:
                raise error(Code.CONFLICT, self.path, "the upload was closed while it was sent", "Start a new upload.")
            while rest:
                written = self._write(self._fd, rest)
                self.offset += written
                rest = rest[written:]

    def sync(self) -> None:
        """Make what was taken survive a power cut. Raises Unavailable."""
        with _narrowed():
            os.fsync(self._fd)


class StagedFile:
    """One staged file, read by position. A `loader` FileReader."""

    def __init__(self, fd: int, name: str, size: int) -> None:
        self._fd = fd
        self._name = name
        self.size = size

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises Refused (ST_TRUNCATED) if they are not there."""
        data = bytearray()
        while len(data) < length:
            with _narrowed():
                more = os.pread(self._fd, length - len(data), offset + len(data))
            if not more:
                raise error(Code.ST_TRUNCATED, self._name, f"ends before byte {offset + length}")
            data += more
        return bytes(data)


class StagedPackage:
    """The staged files by their declared names. A `loader` Package."""

    def __init__(self, files: dict[str, StagedFile]) -> None:
        self._files = files

    def names(self) -> tuple[str, ...]:
        """Sorted by the bytes of the name."""
        return tuple(sorted(self._files, key=str.encode))

    def sizes(self) -> dict[str, int]:
        """Bytes per name."""
        return {name: file.size for name, file in self._files.items()}

    def open(self, name: str) -> StagedFile:
        """Raises KeyError."""
        return self._files[name]


def _lock(fd: int, path: str) -> None:
    """One writer a file, in whatever process: the lock goes with the descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as caught:
        raise error(
            Code.CONFLICT, path, "another request is sending this file",
            "Let it end, ask for the upload's offsets and continue there.",
        ) from caught  # fmt: skip


@contextmanager
def _narrowed(but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Turn what the disk says into own errors, `but` one that means something to the caller."""
    try:
        yield
    except but:
        raise
    except OSError as caught:
        raise _narrow(caught) from caught


def _narrow(caught: OSError) -> AdapterdError:
    if caught.errno in FULL:
        return error(
            Code.STORAGE_FULL, "uploads", "the server's disk is full",
            "What was received is kept; continue when there is room again.",
        )  # fmt: skip
    return error(Code.STORAGE_UNAVAILABLE, "uploads", f"the staging area: {os.strerror(caught.errno or 0)}")
