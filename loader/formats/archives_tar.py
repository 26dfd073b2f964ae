"""A tar file's entries, read strictly: ustar, with the long names and sizes of pax (POSIX 1003.1-2001) and of GNU tar.

Whatever two readers would take differently is refused: two long names for one entry, a field given twice, sparse
files, bytes after the end. Nothing is unpacked; the bytes lie in the file as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from adapterd.loader.errors import Code, Refused, reject
from adapterd.loader.formats.archives_entries import Listing, Place, as_text, corrupt, take, unsupported
from adapterd.loader.formats.readers import FileReader
from adapterd.loader.limits import Limits

BLOCK = 512
MAX_EXTENSION_BYTES = 64 << 10
"""Of one pax or GNU header: they hold a name and some numbers."""
MAX_EXTENSIONS = 4
"""In a row before an entry: pax, its global form, GNU's long name and long link."""

_FILE, _FOLDER, _LINKS, _DEVICES = b"0\0", b"5", b"12", b"346"
_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"x", b"g", b"L", b"K"
_EXTENSIONS = (_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK)
_ZEROS = bytes(BLOCK)
_OCTAL = re.compile(rb"[ ]*([0-7]{0,20})[ \0]*")
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,5}) ([^=\n\0]{1,255})=")
_SET_ID = 0o6000


@dataclass(frozen=True, slots=True)
class _Header:
    name: bytes
    mode: int
    size: int
    kind: bytes
    body: int


def looks_like_tar(start: bytes) -> bool:
    """Whether the first block is a header, or the end mark of an empty archive."""
    return len(start) >= BLOCK and (start[:BLOCK] == _ZEROS or _checksum(start) == _number(start[148:156]))


def read_tar(source: FileReader, limits: Limits, packed_bytes: int) -> dict[str, Place | None]:
    """Name → place of every entry.

    Args:
        packed_bytes: what the archive takes on disk, compressed or not.

    Raises:
        Refused: ARCHIVE_CORRUPT, ARCHIVE_UNSUPPORTED, ARCHIVE_TOO_MANY_ENTRIES, ARCHIVE_BOMB, and what `Listing` finds.
    """
    listing = Listing(limits, packed_bytes)
    at, more = 0, True
    while more:
        at, more = _next(source, at, listing)
    _check_rest(source, at, listing)
    return listing.finish()


def _next(source: FileReader, at: int, listing: Listing) -> tuple[int, bool]:
    """One entry with the headers that belong to it. The place of the next, and whether there is one."""
    extended: dict[str, bytes] = {}
    for _ in range(MAX_EXTENSIONS + 1):
        block = _block(source, at, listing)
        if block == _ZEROS:
            if extended:
                listing.fail(corrupt("ends after a header that belongs to an entry"))
            return at, False
        header = _header(block, at, listing)
        if header.kind not in _EXTENSIONS:
            return _entry(source, header, extended, listing), True
        _extend(extended, header, source, listing)
        at = _after(header.body, header.size)
    raise Refused(*listing.problems, corrupt("too many headers for one entry"))


def _block(source: FileReader, at: int, listing: Listing) -> bytes:
    if at + BLOCK > source.size:
        listing.fail(corrupt("is cut off: its end mark is missing"))
    return take(source, at, BLOCK)


def _header(block: bytes, at: int, listing: Listing) -> _Header:
    size, mode = _number(block[124:136]), _number(block[100:108])
    if _checksum(block) != _number(block[148:156]):
        listing.fail(corrupt("a header's checksum does not hold"))
    if size is None or mode is None:
        listing.fail(corrupt("a header's number is none", as_text(_text(block[:100]))))
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):
        name = prefix + b"/" + name
    return _Header(name, mode, size, block[156:157], at + BLOCK)


def _entry(source: FileReader, header: _Header, extended: Mapping[str, bytes], listing: Listing) -> int:
    """Hand one entry to the listing; the place after its bytes."""
    listing.count()
    name = extended.get("path", header.name)
    size = _size(extended, header, listing)
    if header.kind in _FILE and not name.endswith(b"/"):
        if header.mode & _SET_ID:
            listing.special(name, "would run with its owner's rights")
        if header.body + size > source.size:
            listing.fail(corrupt(f"is cut off: {size} bytes are announced", as_text(name)))
        listing.file(name, Place(header.body, size, size))
        return _after(header.body, size)
    if header.kind in _FILE + _FOLDER:
        listing.folder(name)
    elif header.kind in _LINKS:
        listing.link(name)
    elif header.kind in _DEVICES:
        listing.special(name, "is neither a file nor a folder")
    else:
        listing.fail(unsupported(f"is of a kind that is not read ({as_text(header.kind)})", as_text(name)))
    if size:
        listing.fail(corrupt("is no file, yet has content", as_text(name)))
    return header.body


def _size(extended: Mapping[str, bytes], header: _Header, listing: Listing) -> int:
    told = extended.get("size")
    if told is None:
        return header.size
    if not re.fullmatch(rb"[0-9]{1,18}", told):
        listing.fail(corrupt("a header's number is none", as_text(header.name)))
    return int(told)


def _extend(extended: dict[str, bytes], header: _Header, source: FileReader, listing: Listing) -> None:
    if header.size > MAX_EXTENSION_BYTES:
        listing.fail(corrupt(f"a header of {header.size} bytes, at most {MAX_EXTENSION_BYTES}"))
    body = take(source, header.body, header.size)
    if header.kind in (_PAX, _PAX_GLOBAL):
        found = _pax(body, listing)
        if header.kind == _PAX_GLOBAL and found.keys() & {"path", "size", "linkpath"}:
            listing.fail(unsupported("gives all entries one name or size"))
    else:
        found = {"path" if header.kind == _GNU_NAME else "linkpath": _text(body)}
    if extended.keys() & found.keys():
        listing.fail(corrupt("a header says the same thing twice"))
    extended.update(found)


def _pax(body: bytes, listing: Listing) -> dict[str, bytes]:
    """`LENGTH NAME=VALUE` lines; LENGTH counts the line with all that belongs to it."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(body):
        match = _PAX_RECORD.match(body, at)
        end = at + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(body) or body[end - 1 : end] != b"\n":
            listing.fail(corrupt("a pax header is damaged"))
        key, value = match[2].decode("utf-8", "replace"), body[match.end() : end - 1]
        if key in found:
            listing.fail(corrupt("a header says the same thing twice"))
        if key.startswith("GNU.sparse."):
            listing.refuse(reject(Code.ARCHIVE_UNSUPPORTED, "archive", "holds a sparse file", "Pack without --sparse."))
        found[key] = value
        at = end
    return found


def _check_rest(source: FileReader, at: int, listing: Listing) -> None:
    """After the last entry two empty blocks, and nothing but zeros up to the end."""
    if at + 2 * BLOCK > source.size:
        listing.fail(corrupt("is cut off: its end mark is missing"))
    step = 1 << 20
    for offset in range(at, source.size, step):
        if take(source, offset, min(step, source.size - offset)).strip(b"\0"):
            listing.fail(corrupt("bytes follow the end of the archive"))


def _checksum(block: bytes) -> int:
    """The sum of the header's bytes, the checksum's own taken for spaces."""
    return sum(block[:148]) + sum(block[156:BLOCK]) + 8 * ord(" ")


def _number(field: bytes) -> int | None:
    """Octal digits, or GNU's base 256; None for what is neither, or negative."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    match = _OCTAL.fullmatch(field)
    return int(match[1] or b"0", 8) if match else None


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _after(body: int, size: int) -> int:
    return body + -(-size // BLOCK) * BLOCK
