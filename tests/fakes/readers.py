"""A `FileReader` over bytes that counts what is read."""

from __future__ import annotations

from dataclasses import dataclass

from adapterd.loader.errors import Code, error


class BytesReader:
    """Implements `loader.formats.files.FileReader`; `reads` lists every (offset, length) asked for."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)
        self.reads: list[tuple[int, int]] = []

    def read_at(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        found = self._data[offset : offset + length]
        if len(found) != length:
            raise error(Code.ST_TRUNCATED, "bytes", f"wanted {length} bytes at {offset}, got {len(found)}")
        return found


@dataclass
class Meter:
    """Implements `loader.formats.files.FileReader`; keeps how much was read, not what, so that it has no weight."""

    data: bytes
    total: int = 0
    largest: int = 0

    @property
    def size(self) -> int:
        return len(self.data)

    def read_at(self, offset: int, length: int) -> bytes:
        self.total += length
        self.largest = max(self.largest, length)
        return self.data[offset : offset + length]
