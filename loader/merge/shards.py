"""What a merged model's files will hold, part by part, and writing them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.files import FileReader

_CHUNK = 4 << 20

Part = Callable[[], Iterator[bytes]]
"""Bytes that follow each other, made when they are written."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class NewFile:
    """One file of the merged model.

    Attributes:
        name: path in the folder.
        size: bytes of all parts together.
    """

    name: str
    size: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """Bytes that are put over others of a file that is written already."""

    file: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class NewModel:
    """All files, and the patches to make in them afterwards."""

    files: tuple[NewFile, ...]
    patches: tuple[Callable[[], Iterator[Patch]], ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


def copied(name: str, reader: FileReader) -> NewFile:
    """The base's file as it is."""
    return NewFile(name, reader.size, (part_of(reader, 0, reader.size),))


def made(name: str, data: bytes) -> NewFile:
    """A small file of these bytes."""
    return NewFile(name, len(data), (lambda: iter((data,)),))


def part_of(reader: FileReader, begin: int, end: int) -> Part:
    """Bytes [begin, end) of a file."""

    def read() -> Iterator[bytes]:
        for offset in range(begin, end, _CHUNK):
            yield reader.read_at(offset, min(_CHUNK, end - offset))

    return read


def must_fit(total: int, folder: Path) -> None:
    """Raises Unavailable (STORAGE_FULL) where the file system says that `total` bytes do not fit."""
    free = shutil.disk_usage(folder).free
    if free < total:
        raise error(
            Code.STORAGE_FULL, str(folder), f"the merged model has {total} bytes, {free} are free",
            "Free some space, or name another place with --out.",
        )  # fmt: skip


def write_model(model: NewModel, folder: Path, progress: Progress) -> None:
    """Write all into the empty `folder`, and see it to the disk.

    Args:
        progress: called with the number of bytes written since the last call.

    Raises:
        OSError: of `folder`. Refused: what reading and merging raise.
    """
    for file in model.files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, file, progress)
    for patches in model.patches:
        _patch(folder, patches())
    _sync(folder, {file.name: folder / file.name for file in model.files})


def _write(path: Path, file: NewFile, progress: Progress) -> None:
    written = 0
    with path.open("xb") as out:
        for part in file.parts:
            for data in part():
                out.write(data)
                written += len(data)
                progress(len(data))
    if written != file.size:
        raise ValueError(f"{file.name}: {written} bytes were made of {file.size}")


def _patch(folder: Path, patches: Iterable[Patch]) -> None:
    opened: dict[str, int] = {}
    try:
        for patch in patches:
            if patch.file not in opened:
                opened[patch.file] = os.open(folder / patch.file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if os.pwrite(opened[patch.file], patch.data, patch.offset) != len(patch.data):
                raise error(Code.STORAGE_FULL, patch.file, "could not be written whole", "Free some space.")
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _sync(folder: Path, files: Mapping[str, Path]) -> None:
    """Files first, then the folders that name them."""
    for path in (*files.values(), *sorted({p.parent for p in files.values()} | {folder}, reverse=True)):
        sync(path)


def sync(path: Path) -> None:
    """See one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
