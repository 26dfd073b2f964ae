"""Frames on a stream socket: where one message ends and the next begins. Bytes only, no I/O.

4 bytes   size of what follows, at most MAX_FRAME_BYTES, big-endian
4 bytes   size of the head
…         the head: one message as JSON
…         the body: bytes that the message carries, if any
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAX_FRAME_BYTES = 16 << 20
"""A table of 60 layers of 256 experts takes 6 MB; nothing else comes near."""
MAX_HEAD_BYTES = 4 << 20
_SIZE = struct.Struct(">I")


class Garbled(Exception):
    """The other side does not speak this protocol. Ends the connection, and nothing else."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message, still as bytes."""

    head: bytes
    body: bytes = b""

    def encoded(self) -> bytes:
        """Raises Garbled if it is larger than the other side may take."""
        size = _SIZE.size + len(self.head) + len(self.body)
        if size > MAX_FRAME_BYTES or len(self.head) > MAX_HEAD_BYTES:
            raise Garbled(f"a message of {size} bytes, at most {MAX_FRAME_BYTES} are sent")
        return b"".join((_SIZE.pack(size), _SIZE.pack(len(self.head)), self.head, self.body))


class FrameReader:
    """Cuts a stream into frames. Holds one unfinished frame, and no more than was received of it."""

    def __init__(self) -> None:
        self._held = bytearray()

    @property
    def unfinished(self) -> bool:
        """Whether the stream, were it to end now, would end inside a frame."""
        return bool(self._held)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole now. Raises Garbled; the reader is then of no use any more."""
        self._held += data
        while (size := self._next_size()) is not None and len(self._held) >= _SIZE.size + size:
            frame = self._cut(size)
            del self._held[: _SIZE.size + size]
            yield frame

    def _next_size(self) -> int | None:
        """Judged as soon as it is there: nobody can make us wait for 4 GB."""
        if len(self._held) < _SIZE.size:
            return None
        (size,) = _SIZE.unpack_from(self._held)
        if not _SIZE.size <= size <= MAX_FRAME_BYTES:
            raise Garbled(f"a frame of {size} bytes, {_SIZE.size} to {MAX_FRAME_BYTES} are taken")
        return int(size)

    def _cut(self, size: int) -> Frame:
        (head,) = _SIZE.unpack_from(self._held, _SIZE.size)
        if head > min(size - _SIZE.size, MAX_HEAD_BYTES):
            raise Garbled(f"a head of {head} bytes in a frame of {size}")
        begin = 2 * _SIZE.size
        return Frame(bytes(self._held[begin : begin + head]), bytes(self._held[begin + head : _SIZE.size + size]))
