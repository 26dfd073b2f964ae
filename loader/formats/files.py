"""The bytes of a package: named regular files, opened once and read by position.

"The bytes checked are the bytes stored": a file is opened one time, never through a link, and all
that follows (hash, header, values) reads from that one descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from adapterd.loader.errors import Code, Problem, Refused, error, reject
from adapterd.loader.formats.readers import (
    AGAIN,
    BytesReader,
    DescriptorReader,
    FileReader,
    Package,
    blocks,
    file_entries,
    order,
    read_all,
    read_into,
    read_parts,
    special,
    unreadable,
)
from adapterd.loader.formats.text import shown
from adapterd.loader.limits import Limits

__all__ = [
    "BytesReader", "DescriptorReader", "DirectoryPackage", "FileReader", "Package", "blocks", "file_entries",
    "order", "read_all", "read_into", "read_parts",
]  # fmt: skip

# A package is flat; folders are listed only to say what is wrong with them.
MAX_FOLDER_DEPTH = 4
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


class DirectoryPackage:
    """A folder on disk, looked through once. A context manager that closes what was opened.

    A file is opened at its first `open` and never again; it must still have the size that it was listed with.
    """

    def __init__(self, root: int, sizes: dict[str, int]) -> None:
        """`root` is an open descriptor of the folder, which this object owns."""
        self._root = root
        self._sizes = sizes
        self._names = tuple(sorted(sizes, key=order))
        self._opened: dict[str, DescriptorReader] = {}

    @classmethod
    def open_dir(cls, path: Path, limits: Limits, only: Collection[str] | None = None) -> Self:
        """List all that lies below `path`, or just the files of the names `only` that are there.

        Raises:
            NotFound: PATH_NOT_FOUND where `path` is no readable folder.
            Refused: UNSAFE_LINK, ARCHIVE_SPECIAL_FILE, ARCHIVE_BAD_NAME, ARCHIVE_TOO_MANY_ENTRIES.
        """
        root = _open_root(path)
        try:
            sizes = _listed(root, limits, only)
        except BaseException:
            os.close(root)
            raise
        return cls(root, sizes)

    def names(self) -> tuple[str, ...]:
        return self._names

    def sizes(self) -> dict[str, int]:
        """Bytes per name, as `package.judge_package` wants them; a folder counts 0."""
        return dict(self._sizes)

    def open(self, name: str) -> DescriptorReader:
        """Raises KeyError for a name that is not there; Refused and NotFound if the folder has changed."""
        if name not in self._opened:
            size = self._sizes[name]
            reader = DescriptorReader(_open_below(self._root, name), name)
            self._opened[name] = reader
            if reader.size != size:
                raise error(Code.ST_TRUNCATED, shown(name), f"{reader.size} bytes, {size} when it was listed", AGAIN)
        return self._opened[name]

    def close(self) -> None:
        for reader in self._opened.values():
            reader.close()
        self._opened = {}
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def names_in(path: Path, limits: Limits) -> tuple[list[str], bool]:
    """Names at the top of a folder, and whether there are more than an adapter may have; nothing is opened.

    Raises:
        NotFound: PATH_NOT_FOUND where `path` is no readable folder.
    """
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in islice(entries, limits.max_archive_entries + 1)]
    except OSError as failure:
        raise unreadable(str(path), failure) from None
    return sorted(names[: limits.max_archive_entries], key=os.fsencode), len(names) > limits.max_archive_entries


def _listed(root: int, limits: Limits, only: Collection[str] | None) -> dict[str, int]:
    scan = _Scan(limits.max_archive_entries)
    try:
        if only is None:
            scan.walk(root, "", 1)
        else:
            scan.pick(root, only)
    except OSError as failure:  # a file that went away while the folder was read
        raise unreadable("the folder", failure) from None
    if scan.problems:
        raise Refused(*scan.problems)
    return scan.sizes


class _Scan:
    """One walk over a folder: notes every regular file, and what is none."""

    def __init__(self, max_entries: int) -> None:
        self.sizes: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._left = max_entries

    def walk(self, folder: int, prefix: str, depth: int) -> None:
        for name in self._names(folder, prefix):
            self._visit(folder, name, prefix + name, depth)

    def pick(self, folder: int, names: Collection[str]) -> None:
        """Just these names of one folder; what else is there is not looked at."""
        for name in sorted(names, key=os.fsencode):
            with contextlib.suppress(FileNotFoundError):
                self._visit(folder, name, name, MAX_FOLDER_DEPTH)

    def _names(self, folder: int, prefix: str) -> list[str]:
        """The folder's names, sorted; of a folder with a million, no more are read than may be there."""
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, self._left + 1)]
        self._left -= len(names)
        if self._left < 0:
            raise error(
                Code.ARCHIVE_TOO_MANY_ENTRIES, shown(prefix or "."), "too many files for an adapter",
                "Upload a folder with only the adapter's own files.",
            )  # fmt: skip
        return sorted(names, key=os.fsencode)

    def _visit(self, folder: int, name: str, full: str, depth: int) -> None:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if any("\ud800" <= c <= "\udfff" for c in name):
            self.problems.append(reject(Code.ARCHIVE_BAD_NAME, shown(full), "the file's name is not UTF-8"))
        elif stat.S_ISLNK(found.st_mode):
            self.problems.append(_link(full))
        elif stat.S_ISDIR(found.st_mode):
            self._enter(folder, name, full, depth)
        elif stat.S_ISREG(found.st_mode):
            self.sizes[full] = found.st_size
        else:
            self.problems.append(special(full))

    def _enter(self, folder: int, name: str, full: str, depth: int) -> None:
        # What tools keep in hidden folders (.git, .cache) is nobody's adapter and may be huge.
        if name.startswith(".") or depth >= MAX_FOLDER_DEPTH:
            self.sizes[full + "/"] = 0
            return
        known = len(self.sizes) + len(self.problems)
        child = _open_at(folder, name, full, _OPEN_FOLDER)
        try:
            self.walk(child, full + "/", depth + 1)
        finally:
            os.close(child)
        if known == len(self.sizes) + len(self.problems):
            self.sizes[full + "/"] = 0  # an empty folder is told, too


def _link(full: str) -> Problem:
    message = "is a symbolic link; links are not followed, not even inside the folder"
    return reject(Code.UNSAFE_LINK, shown(full), message, "Replace it by the file itself (cp -L).")


def _open_root(path: Path) -> int:
    """The folder itself may be reached through a link: that is the caller's choice, not the package's."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as failure:
        raise unreadable(str(path), failure) from None


def _open_below(root: int, name: str) -> int:
    """Folder by folder, so that no part of the path is a link."""
    *folders, last = name.split("/")
    folder = os.dup(root)
    try:
        for part in folders:
            child = _open_at(folder, part, name, _OPEN_FOLDER)
            os.close(folder)
            folder = child
        return _open_at(folder, last, name, _OPEN_FILE)
    finally:
        os.close(folder)


def _open_at(folder: int, name: str, full: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as failure:
        if failure.errno == errno.ELOOP:  # swapped for a link since it was listed
            raise Refused(_link(full)) from None
        raise unreadable(full, failure) from None
