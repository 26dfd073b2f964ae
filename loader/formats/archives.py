"""The one way to open an adapter: a folder, a zip, a tar or a tar.gz.

No entry of an archive ever gets a name on this machine. Names are judged, the bytes that are asked for are unpacked
into one nameless scratch file (`Spool`), which goes with the process, however that ends; the entries of a plain tar
are read where they lie. Memory is bounded by the number of entries, time and disk by the archive's size and the quotas.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from adapterd.loader.errors import Code, Refused, reject
from adapterd.loader.formats.archives_entries import Place, check_growth, corrupt, take, unsupported
from adapterd.loader.formats.archives_tar import BLOCK, looks_like_tar, read_tar
from adapterd.loader.formats.archives_zip import read_zip
from adapterd.loader.formats.files import DirectoryPackage
from adapterd.loader.formats.leftovers import TWO_FILES
from adapterd.loader.formats.readers import DescriptorReader, FileReader, order, unreadable
from adapterd.loader.formats.spool import SliceReader, Spool, Write
from adapterd.loader.formats.text import shown
from adapterd.loader.limits import Limits

_ZIP, _GZIP = (b"PK\x03\x04", b"PK\x05\x06"), b"\x1f\x8b"
_OTHERS = {
    b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
}  # fmt: skip
_INPUT_BYTES = 64 << 10
_OUTPUT_BYTES = 1 << 20


def open_package(path: Path, limits: Limits) -> DirectoryPackage | ArchivePackage:
    """Open what `path` names, judged by its first bytes and not by its suffix. A context manager.

    One folder in which all entries of an archive lie is taken off their names.

    Raises:
        NotFound: PATH_NOT_FOUND.
        Refused: what `DirectoryPackage.open_dir`, `read_zip` and `read_tar` raise; UNKNOWN_FORMAT.
        Unavailable: STORAGE_FULL, STORAGE_UNAVAILABLE where there is no room to unpack.
    """
    if os.path.isdir(path):  # noqa: PTH112 - pathlib's raises for a path that may not be looked at
        return DirectoryPackage.open_dir(path, limits)
    return ArchivePackage.open_file(path, limits)


class ArchivePackage:
    """The entries of an archive by their canonical names. A context manager that closes what was opened."""

    def __init__(self, source: FileReader, places: dict[str, Place | None], spool: Spool, opened: ExitStack) -> None:
        """`opened` closes `source` and `spool`."""
        self._source = source
        self._places = places
        self._names = tuple(sorted(places, key=order))
        self._spool = spool
        self._readers: dict[str, SliceReader] = {}
        self._opened = opened

    @classmethod
    def open_file(cls, path: Path, limits: Limits, write: Write = os.write) -> Self:
        """As `open_package`, of a file; `write` is how `Spool` writes."""
        with ExitStack() as stack:
            archive = _opened(path)
            stack.callback(archive.close)
            spool = Spool(write)
            stack.callback(spool.close)
            source = _uncompressed(archive, spool, limits)
            places = _listed(source, archive, path, limits)
            return cls(source, places, spool, stack.pop_all())

    def names(self) -> tuple[str, ...]:
        return self._names

    def sizes(self) -> dict[str, int]:
        """Bytes per name, as the archive declares and `open` checks them."""
        return {name: place.size if place else 0 for name, place in self._places.items()}

    def open(self, name: str) -> SliceReader:
        """The entry's bytes, unpacked and checked the first time.

        Raises:
            KeyError: there is no such entry.
            Refused: ARCHIVE_CORRUPT, FILE_CHANGED.
            Unavailable: STORAGE_FULL, STORAGE_UNAVAILABLE.
        """
        if name not in self._readers:
            place = self._places[name]
            if place is None:
                raise KeyError(name)
            self._readers[name] = self._reader(name, place)
        return self._readers[name]

    def _reader(self, name: str, place: Place) -> SliceReader:
        if place.crc32 is None:
            return SliceReader(self._source, place.offset, place.size, name)
        start = self._spool.size
        _unpack(self._source, place, name, self._spool)
        return self._spool.reader(start, place.size, name)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _opened(path: Path) -> DescriptorReader:
    """The file itself may be reached through a link: that is the caller's choice, not the archive's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as failure:
        raise unreadable(str(path), failure) from None
    return DescriptorReader(descriptor, str(path))


def _uncompressed(archive: DescriptorReader, spool: Spool, limits: Limits) -> FileReader:
    """The archive itself, or what its gzip holds."""
    if take(archive, 0, min(2, archive.size)) != _GZIP:
        return archive
    _gunzip(archive, spool, limits)
    return spool.reader(0, spool.size, "archive")


def _listed(source: FileReader, archive: DescriptorReader, path: Path, limits: Limits) -> dict[str, Place | None]:
    start = take(source, 0, min(BLOCK, source.size))
    if looks_like_tar(start):
        return read_tar(source, limits, archive.size)
    if start.startswith(_ZIP) and source is archive:
        return read_zip(source, limits)
    for mark, tool in _OTHERS.items():
        if start.startswith(mark):
            raise Refused(unsupported(f"is packed with {tool}; zip, tar and tar.gz are read", str(path)))
    if source is not archive:
        raise Refused(corrupt("is gzip, but holds no tar", str(path)))
    raise Refused(reject(Code.UNKNOWN_FORMAT, shown(path), "is neither a folder nor a zip or tar archive", TWO_FILES))


def _gunzip(archive: FileReader, spool: Spool, limits: Limits) -> None:
    """One gzip member, and nothing after it."""
    inflater = zlib.decompressobj(wbits=31)

    def keep(data: bytes) -> None:
        check_growth(spool.size + len(data), archive.size, limits)
        spool.append(data)

    _inflate(inflater, archive, 0, archive.size, keep, "archive")


def _unpack(source: FileReader, place: Place, name: str, spool: Spool) -> None:
    """One entry of a zip; never more than the size it declares, which the quotas have passed."""
    crc, left = 0, place.size

    def keep(data: bytes) -> None:
        nonlocal crc, left
        left -= len(data)
        if left < 0:
            raise Refused(corrupt(f"holds more than the {place.size} bytes that it declares", name))
        crc = zlib.crc32(data, crc)
        spool.append(data)

    if place.method:
        _inflate(zlib.decompressobj(wbits=-15), source, place.offset, place.packed, keep, name)
    else:
        for offset in range(place.offset, place.offset + place.packed, _OUTPUT_BYTES):
            keep(take(source, offset, min(_OUTPUT_BYTES, place.offset + place.packed - offset)))
    if left:
        raise Refused(corrupt(f"holds fewer than the {place.size} bytes that it declares", name))
    if crc != place.crc32:
        raise Refused(corrupt("its checksum does not hold", name))


def _inflate(
    inflater: zlib._Decompress, source: FileReader, start: int, length: int, keep: Callable[[bytes], None], name: str
) -> None:
    """All of the packed bytes, which must be one deflate stream; in pieces, so that memory does not grow."""
    at, end = start, start + length
    try:
        while not inflater.eof:
            packed = inflater.unconsumed_tail
            if not packed and at < end:
                packed = take(source, at, min(_INPUT_BYTES, end - at))
                at += len(packed)
            data = inflater.decompress(packed, _OUTPUT_BYTES)
            if not data and not packed:
                break
            keep(data)
    except zlib.error:
        raise Refused(corrupt("its packed bytes are damaged", name)) from None
    if not inflater.eof:
        raise Refused(corrupt("is cut off", name))
    if inflater.unused_data or inflater.unconsumed_tail or at < end:
        raise Refused(corrupt("bytes follow its packed content", name))
