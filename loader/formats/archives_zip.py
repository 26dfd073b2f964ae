"""The directory of a zip file, read strictly (PKWARE APPNOTE 6.3.10): every byte of the file has one owner.

Entries, directory and end record follow each other without gap, overlap or remainder, and each local header says
what the directory says. So first-wins and last-wins readers, and those that skip the directory, see one archive.
"""

from __future__ import annotations

import stat
import struct
from dataclasses import dataclass

from adapterd.loader.formats.archives_entries import (
    DEFLATED,
    STORED,
    Listing,
    Place,
    as_text,
    check_count,
    corrupt,
    fail,
    take,
    unsupported,
)
from adapterd.loader.formats.readers import FileReader
from adapterd.loader.limits import Limits

_END, _END64, _LOCATOR64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_CENTRAL, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 0xFFFF
_SEE_EXTRA = 0xFFFFFFFF
_SEE_EXTRA_16 = 0xFFFF
_ENCRYPTED_FLAGS, _DESCRIPTOR_FLAG, _PATCH_FLAG = 0x2041, 0x0008, 0x0020
_EXTRA_ZIP64, _EXTRA_UNICODE_PATH = 0x0001, 0x7075
_DOS_FOLDER = 0x10
_DESCRIPTOR_MARK = b"PK\x07\x08"
_DESCRIPTORS = {12: "<3L", 16: "<4s3L", 20: "<L2Q", 24: "<4sL2Q"}
"""Length of a data descriptor → CRC, packed, size; without and with signature, of 32 and 64 bits."""


@dataclass(frozen=True, slots=True)
class _Record:
    """One record of the directory."""

    raw_name: bytes
    flags: int
    method: int
    crc32: int
    packed: int
    size: int
    header: int
    mode: int
    dos: int


@dataclass(frozen=True, slots=True)
class _Directory:
    count: int
    start: int
    end: int


def read_zip(source: FileReader, limits: Limits) -> dict[str, Place | None]:
    """Name → place of every entry; nothing is unpacked.

    Raises:
        Refused: ARCHIVE_CORRUPT, ARCHIVE_UNSUPPORTED, ARCHIVE_TOO_MANY_ENTRIES, ARCHIVE_BOMB, and what `Listing` finds.
    """
    directory = _directory(source)
    check_count(directory.count, limits)
    listing = Listing(limits, source.size)
    records = _records(source, directory, listing)
    if listing.problems:
        listing.finish()
    if (records[0].header if records else directory.start) != 0:
        fail(corrupt("bytes lie before the first entry"))
    for record, following in zip(records, [*(r.header for r in records[1:]), directory.start], strict=True):
        place = _placed(source, record, following, listing)
        if record.raw_name.endswith(b"/"):
            listing.folder(record.raw_name)
        else:
            listing.file(record.raw_name, place)
    return listing.finish()


def _directory(source: FileReader) -> _Directory:
    """The end record must end the file; with its comment, if it has one."""
    length = min(source.size, _END.size + _MAX_COMMENT)
    tail = take(source, source.size - length, length)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        fail(corrupt("has no directory at its end; is it complete?"))
    _, disk, first_disk, here, count, size, start, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail):
        fail(corrupt("bytes follow the end of the archive"))
    end = source.size - len(tail) + at
    numbers, end = _wide(source, (disk, first_disk, here, count, size, start), end)
    disk, first_disk, here, count, size, start = numbers
    if disk or first_disk or here != count:
        fail(unsupported("is one part of an archive in several files"))
    if start + size != end:
        fail(corrupt("the directory is not where the archive says it is"))
    return _Directory(count, start, end)


def _wide(source: FileReader, narrow: tuple[int, ...], end: int) -> tuple[tuple[int, ...], int]:
    """The numbers and the directory's end from the 64-bit record, where there is one."""
    at = end - _LOCATOR64.size
    located = take(source, at, _LOCATOR64.size) if at >= 0 else b""
    if not located.startswith(b"PK\x06\x07"):
        return narrow, end
    _, _, where, disks = _LOCATOR64.unpack(located)
    if where != at - _END64.size or disks > 1:
        fail(corrupt("the 64-bit end record is not where the archive says it is"))
    mark, length, _, _, *wide = _END64.unpack(take(source, where, _END64.size))
    if mark != b"PK\x06\x06" or length != _END64.size - 12:
        fail(corrupt("the 64-bit end record is damaged"))
    tops = (*[_SEE_EXTRA_16] * 4, *[_SEE_EXTRA] * 2)
    if any(n not in (w, top) for n, w, top in zip(narrow, wide, tops, strict=True)):
        fail(corrupt("the two end records contradict each other"))
    return tuple(wide), where


def _records(source: FileReader, directory: _Directory, listing: Listing) -> list[_Record]:
    """The directory's records by the place of their entries; what each one is goes to the listing's problems."""
    records: list[_Record] = []
    at = directory.start
    for _ in range(directory.count):
        record, at = _record(source, at, directory.end, listing)
        records.append(record)
        _judge_kind(record, listing)
    if at != directory.end:
        listing.fail(corrupt("the directory holds more than it counts"))
    return sorted(records, key=lambda r: r.header)


def _record(source: FileReader, at: int, end: int, listing: Listing) -> tuple[_Record, int]:
    if at + _CENTRAL.size > end:
        listing.fail(corrupt("the directory holds less than it counts"))
    fields = _CENTRAL.unpack(take(source, at, _CENTRAL.size))
    mark, _, _, flags, method, _, _, crc, packed, size, n_name, n_extra, n_comment, disk, _, attributes, header = fields
    after = at + _CENTRAL.size + n_name + n_extra + n_comment
    if mark != b"PK\x01\x02" or after > end:
        listing.fail(corrupt("the directory is damaged"))
    tail = take(source, at + _CENTRAL.size, n_name + n_extra)
    raw_name = tail[:n_name]
    size, packed, header, disk = _from_extra(
        tail[n_name:], ((size, _SEE_EXTRA), (packed, _SEE_EXTRA), (header, _SEE_EXTRA), (disk, _SEE_EXTRA_16)),
        raw_name, listing,
    )  # fmt: skip
    if disk:
        listing.fail(unsupported("is one part of an archive in several files"))
    return _Record(raw_name, flags, method, crc, packed, size, header, attributes >> 16, attributes & 0xFF), after


def _from_extra(
    extra: bytes, numbers: tuple[tuple[int, int], ...], raw_name: bytes, listing: Listing
) -> tuple[int, ...]:
    """The numbers, those that are at their top taken from the 64-bit field; and no second name."""
    fields: dict[int, bytes] = {}
    at = 0
    while at < len(extra):
        kind, length = struct.unpack_from("<2H", extra, at) if at + 4 <= len(extra) else (0, len(extra))
        if at + 4 + length > len(extra) or kind in fields:
            listing.fail(corrupt("an extra field is damaged", as_text(raw_name)))
        fields[kind] = extra[at + 4 : at + 4 + length]
        at += 4 + length
    if fields.get(_EXTRA_UNICODE_PATH, b"....." + raw_name)[5:] != raw_name:
        listing.fail(corrupt("has two names", as_text(raw_name)))
    wide = fields.get(_EXTRA_ZIP64, b"")
    found: list[int] = []
    for number, top in numbers:
        width = 4 if top == _SEE_EXTRA_16 else 8
        if number == top and len(wide) >= width:
            found.append(int.from_bytes(wide[:width], "little"))
            wide = wide[width:]
        else:
            found.append(number)
    return tuple(found)


def _judge_kind(record: _Record, listing: Listing) -> None:
    name, kind = record.raw_name, stat.S_IFMT(record.mode)
    folder = name.endswith(b"/")
    if stat.S_ISLNK(record.mode):
        listing.link(name)
    elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        listing.special(name, "is neither a file nor a folder")
    elif not folder and record.mode & (stat.S_ISUID | stat.S_ISGID):
        listing.special(name, "would run with its owner's rights")
    elif not folder and (kind == stat.S_IFDIR or record.dos & _DOS_FOLDER):
        listing.refuse(corrupt("is a folder for some systems and a file for others", as_text(name)))
    elif folder and record.size:
        listing.refuse(corrupt("is a folder with content", as_text(name)))
    if record.flags & (_ENCRYPTED_FLAGS | _PATCH_FLAG):
        listing.refuse(unsupported("is encrypted", as_text(name)))
    elif record.method not in (STORED, DEFLATED):
        listing.refuse(unsupported(f"is packed with method {record.method}", as_text(name)))
    elif record.method == STORED and record.packed != record.size:
        listing.refuse(corrupt("has two sizes", as_text(name)))


def _placed(source: FileReader, record: _Record, following: int, listing: Listing) -> Place:
    """Where the entry's bytes lie, once its own header says what the directory says."""
    where = as_text(record.raw_name)
    fields = _LOCAL.unpack(take(source, record.header, _LOCAL.size))
    mark, _, flags, method, _, _, crc, packed, size, n_name, n_extra = fields
    tail = take(source, record.header + _LOCAL.size, n_name + n_extra)
    if (mark, flags, method, tail[:n_name]) != (b"PK\x03\x04", record.flags, record.method, record.raw_name):
        listing.fail(corrupt("its own header and the directory contradict each other", where))
    size, packed = _from_extra(tail[n_name:], ((size, _SEE_EXTRA), (packed, _SEE_EXTRA)), record.raw_name, listing)
    told, wanted = (crc, packed, size), (record.crc32, record.packed, record.size)
    later = flags & _DESCRIPTOR_FLAG
    if told != wanted and not (later and all(t in (0, w, _SEE_EXTRA) for t, w in zip(told, wanted, strict=True))):
        listing.fail(corrupt("its own header and the directory give two sizes", where))
    start = record.header + _LOCAL.size + len(tail)
    _check_end(source, start + record.packed, following, wanted if later else None, where, listing)
    return Place(start, record.packed, record.size, record.method, record.crc32)


def _check_end(
    source: FileReader, end: int, following: int, wanted: tuple[int, int, int] | None, where: str, listing: Listing
) -> None:
    """The next entry begins where this one ends; in between there is a data descriptor, if one is announced."""
    gap = following - end
    if wanted is None:
        if gap:
            listing.fail(corrupt("entries overlap, or bytes lie between them", where))
        return
    form = _DESCRIPTORS.get(gap)
    found = struct.unpack(form, take(source, end, gap)) if form else ()
    if found not in (wanted, (_DESCRIPTOR_MARK, *wanted)):
        listing.fail(corrupt("what follows its bytes and the directory contradict each other", where))
