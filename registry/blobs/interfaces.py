"""The port behind which stored files live."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.identity import check_digest, sha256_hex

CHUNK_BYTES = 1 << 20


class BlobStore(Protocol):
    """Immutable files by tenant and SHA-256 (hex); nothing is shared across tenants (I9). Thread-safe.

    Raises (all methods, while a `read` is consumed, too):
        Unavailable: STORAGE_FULL, STORAGE_UNAVAILABLE.
    """

    def check(self) -> None:
        """Returns if the store can be reached now."""
        ...

    def put(self, tenant: str, sha256: str, source: Path) -> None:
        """Store the file; idempotent, and puts right what was damaged meanwhile.

        The bytes are hashed as they are stored; others see all of the blob or nothing.

        Raises:
            Refused: HASH_MISMATCH, and nothing is stored.
            NotFound: PATH_NOT_FOUND, no regular file at `source`.
        """
        ...

    def size(self, tenant: str, sha256: str) -> int | None:
        """Bytes, or None when the tenant has no such blob."""
        ...

    def read(self, tenant: str, sha256: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The bytes from `offset`, at most `length`, in pieces of at most 1 MiB; nothing beyond the end.

        The store is asked when the first piece is. Raises NotFound then.
        """
        ...

    def delete(self, tenant: str, sha256: str) -> None:
        """Remove the blob; returns also when there is none."""
        ...

    def sweep(self) -> None:
        """Remove what processes that were killed in a `put` left half stored."""
        ...


def blob_key(tenant: str, sha256: str) -> str:
    """`<tenant's digest>/<2 hex>/<64 hex>`: no name becomes a path (I6). Raises Failed (REF_INVALID)."""
    check_digest("sha256", sha256)
    owner = sha256_hex(b"adapterd.blobs/1\0" + tenant.encode())
    return f"{owner}/{sha256[:2]}/{sha256}"


def hash_mismatch(sha256: str, found: str) -> AdapterdError:
    """Refused (HASH_MISMATCH)."""
    return error(Code.HASH_MISMATCH, sha256, f"the bytes hash to {found}")


@contextmanager
def open_source(source: Path) -> Iterator[BinaryIO]:
    """The file to store, opened once and without following a link. Raises NotFound (PATH_NOT_FOUND)."""
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as caught:
        raise error(Code.PATH_NOT_FOUND, str(source), f"cannot be opened: {caught.strerror}") from caught
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise error(Code.PATH_NOT_FOUND, str(source), "is not a regular file")
    with os.fdopen(fd, "rb") as reader:
        yield reader
