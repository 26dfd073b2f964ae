"""A `FileReader` over bytes that counts what is read."""

from __future__ import annotations

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
