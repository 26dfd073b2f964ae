"""Bytes in and out: raw bodies to a receiver, stored files with ranges, both in bounded memory."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from itertools import chain
from typing import Protocol, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from adapterd.loader.identity import FileEntry
from adapterd.registry.api.problems import RangeInvalid
from adapterd.registry.blobs.interfaces import BlobStore

T = TypeVar("T")

BUFFER_BYTES = 1 << 20
_RANGE = re.compile(r"bytes\s*=\s*(?P<first>\d*)-(?P<last>\d*)\s*", re.ASCII | re.IGNORECASE)
_MAX_RANGE_CHARS = 64


class OnDisk(Protocol):
    """How work gets to a thread that may wait for a disk."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


async def pour(request: Request, take: Callable[[bytes], None], on_disk: OnDisk) -> int:
    """Hand the body on in pieces of about 1 MiB, also what came before a client went away; returns the bytes."""
    buffer, count = bytearray(), 0
    try:
        async for piece in request.stream():
            buffer += piece
            count += len(piece)
            if len(buffer) >= BUFFER_BYTES:
                await on_disk(partial(take, bytes(buffer)))
                buffer.clear()
    except ClientDisconnect:
        await on_disk(partial(take, bytes(buffer)))
        raise
    await on_disk(partial(take, bytes(buffer)))
    return count


async def file_response(
    request: Request, blobs: BlobStore, tenant: str, entry: FileEntry, media_type: str, on_disk: OnDisk
) -> Response:
    """A stored file, or the one range of it that is asked for (RFC 9110 §14).

    Raises:
        RangeInvalid: for a range outside the file, or one that is none.
        NotFound, Unavailable: before the answer begins, from the store.
    """
    etag = f'"{entry.sha256}"'
    digest = base64.b64encode(bytes.fromhex(entry.sha256)).decode("ascii")
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, max-age=31536000, immutable",
        "ETag": etag,
        "Repr-Digest": f"sha-256=:{digest}:",
    }
    wanted = _wanted_range(request.headers.get("Range"), request.headers.get("If-Range"), etag, entry.size)
    first, length = wanted or (0, entry.size)
    if wanted:
        headers["Content-Range"] = f"bytes {first}-{first + length - 1}/{entry.size}"
    headers["Content-Length"] = str(length)
    pieces = await on_disk(partial(_begun, blobs.read(tenant, entry.sha256, first, length)))
    return StreamingResponse(
        _from_disk(pieces, on_disk), 206 if wanted else 200, headers=headers, media_type=media_type
    )


def _begun(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Have the first piece, so that what goes wrong with the store is still an answer with a status."""
    first = next(pieces, b"")
    return chain([first], pieces)


async def _from_disk(pieces: Iterator[bytes], on_disk: OnDisk) -> AsyncIterator[bytes]:
    while (piece := await on_disk(partial(next, pieces, None))) is not None:
        yield piece


def _wanted_range(header: str | None, if_range: str | None, etag: str, size: int) -> tuple[int, int] | None:
    """(offset, length); None, the whole file, for no range, another unit, several ranges, a changed file."""
    if header is None or not header.lower().lstrip().startswith("bytes") or "," in header:
        return None
    if if_range is not None and if_range != etag:
        return None
    match = _RANGE.fullmatch(header)
    if match is None or match["first"] == match["last"] == "" or len(header) > _MAX_RANGE_CHARS:
        raise RangeInvalid(size, "this is not a range of bytes")
    first, last = _bounds(match["first"], match["last"], size)
    if first >= size or last < first:
        raise RangeInvalid(size, f"the file has {size} bytes")
    return first, last - first + 1


def _bounds(first: str, last: str, size: int) -> tuple[int, int]:
    if first == "":
        return max(0, size - int(last)), size - 1 if int(last) else -1
    return int(first), min(int(last), size - 1) if last else size - 1
