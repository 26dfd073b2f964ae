"""Archives made byte by byte, so that tests can lie in any field."""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_MODE = stat.S_IFREG | 0o644


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@dataclass(frozen=True)
class ZipEntry:
    """One entry; `local` and `central` replace header fields of one of the two places, by name."""

    name: bytes
    data: bytes = b""
    method: int = 8
    flags: int = 0
    mode: int = FILE_MODE
    extra: bytes = b""
    local: Mapping[str, Any] | None = None
    central: Mapping[str, Any] | None = None
    descriptor: str = ""

    def _fields(self, packed: bytes) -> dict[str, Any]:
        return {
            "name": self.name, "flags": self.flags | (8 if self.descriptor else 0), "method": self.method,
            "crc": zlib.crc32(self.data), "packed": len(packed), "size": len(self.data), "extra": self.extra,
            "mode": self.mode,
        }  # fmt: skip


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def zip_of(
    entries: Iterable[ZipEntry], *, before: bytes = b"", gap: bytes = b"", after: bytes = b"", **end: int
) -> bytes:
    """A zip file. `before`, `gap` (after the first entry) and `after` are bytes that no entry owns.

    `end` replaces fields of the end record: `count`, `size`, `start`.
    """
    out, directory = bytearray(before), bytearray()
    count = 0
    for entry in entries:
        packed = deflated(entry.data) if entry.method == 8 else entry.data
        fields = entry._fields(packed)
        central = fields | {"header": len(out)} | dict(entry.central or {})
        local = fields | ({"crc": 0, "packed": 0, "size": 0} if entry.descriptor else {}) | dict(entry.local or {})
        out += struct.pack(
            "<4s5H3L2H", b"PK\x03\x04", 20, local["flags"], local["method"], 0, 33, local["crc"], local["packed"],
            local["size"], len(local["name"]), len(local["extra"]),
        )  # fmt: skip
        out += local["name"] + local["extra"] + packed
        if entry.descriptor:
            mark = b"PK\x07\x08" if entry.descriptor.startswith("<4s") else b""
            form = entry.descriptor.replace("4s", "")
            out += mark + struct.pack(form, fields["crc"], fields["packed"], fields["size"])
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\x01\x02", 3 << 8 | 20, 20, central["flags"], central["method"], 0, 33,
            central["crc"], central["packed"], central["size"], len(central["name"]), len(central["extra"]), 0, 0, 0,
            central["mode"] << 16, central["header"],
        )  # fmt: skip
        directory += central["name"] + central["extra"]
        out += gap if not count else b""
        count += 1
    known = {"count": count, "size": len(directory), "start": len(out)} | end
    tail = struct.pack(
        "<4s4H2LH", b"PK\x05\x06", 0, 0, known["count"], known["count"], known["size"], known["start"], 0
    )
    return bytes(out + directory) + tail + after


def zipped(files: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """As the standard library writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return buffer.getvalue()


class _Pipe(io.RawIOBase):
    """Takes bytes and cannot seek: a zip written here has data descriptors."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.taken += data
        return len(data)


def zipped_as_stream(files: Mapping[str, bytes], *, wide: bool = False) -> bytes:
    """As `zip - …` writes to a pipe; `wide`: with 64-bit sizes."""
    pipe = _Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(info, "w", force_zip64=wide) as entry:
                entry.write(data)
    return bytes(pipe.taken)


def tar_of(
    files: Mapping[str, bytes],
    *,
    form: int = tarfile.PAX_FORMAT,
    change: Callable[[tarfile.TarInfo], object] | None = None,
) -> bytes:
    """As the standard library writes it; `change` may alter each entry's header."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if change:
                change(info)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def tar_block(name: bytes, size: bytes | int, kind: bytes = b"0", *, mode: int = 0o644, prefix: bytes = b"") -> bytes:
    """One header with a checksum that holds."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    block = bytearray(512)
    block[0 : len(name)] = name
    block[100:108] = b"%07o\0" % mode
    block[124:136] = field
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    """A pax header with its lines."""
    body = b""
    for key, value in records:
        rest = b" " + key + b"=" + value + b"\n"
        length = len(rest) + len(str(len(rest) + 2))
        length = length if len(str(length)) + len(rest) == length else length + 1
        body += str(length).encode() + rest
    return tar_block(b"pax", len(body), kind) + padded(body)


END = bytes(1024)
