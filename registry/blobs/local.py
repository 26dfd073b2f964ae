"""Blobs in a folder of the local disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

from adapterd.loader.disk import FULL, require_writable
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.parts import part, sweep_parts
from adapterd.registry.blobs.interfaces import CHUNK_BYTES, blob_key, hash_mismatch, open_source
from adapterd.registry.errors import missing


class LocalBlobs:
    """`BlobStore` under one folder: `root/<blob_key>`, and `root/tmp` for what is on its way.

    A blob is written to `tmp`, hashed on the way, synced, and renamed: a crash leaves at most a file
    in `tmp`, which nothing reads and `sweep` removes. Readers of a blob that is stored again keep the bytes
    they opened.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tmp = root / "tmp"

    def path(self, tenant: str, sha256: str) -> Path:
        """Where the blob's file is, or would be."""
        return self._root / blob_key(tenant, sha256)

    def check(self) -> None:
        with _narrowed():
            require_writable(self._tmp)
            require_writable(self._root)

    def put(self, tenant: str, sha256: str, source: Path) -> None:
        target = self.path(tenant, sha256)
        with open_source(source) as reader, _narrowed():
            self._tmp.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with part(self._tmp) as (written, _):
                found = _copy(reader, written)
                if found == sha256:
                    written.replace(target)
            if found != sha256:
                raise hash_mismatch(sha256, found)
            for folder in (target.parent, target.parent.parent, self._root):
                sync_folder(folder)

    def size(self, tenant: str, sha256: str) -> int | None:
        with _narrowed():
            try:
                return self.path(tenant, sha256).stat().st_size
            except FileNotFoundError:
                return None

    def read(self, tenant: str, sha256: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        with _narrowed():
            try:
                file = self.path(tenant, sha256).open("rb", buffering=0)
            except FileNotFoundError:
                raise missing(sha256) from None
            with file:
                file.seek(offset)
                left = length if length is not None else os.fstat(file.fileno()).st_size
                while left > 0 and (piece := file.read(min(CHUNK_BYTES, left))):
                    left -= len(piece)
                    yield piece

    def delete(self, tenant: str, sha256: str) -> None:
        with _narrowed():
            self.path(tenant, sha256).unlink(missing_ok=True)

    def sweep(self) -> None:
        sweep_parts(self._tmp)


def storage_error(caught: OSError, where: str = "blobs") -> AdapterdError:
    """Unavailable: STORAGE_FULL or STORAGE_UNAVAILABLE."""
    what = f"{caught.strerror or caught}: {caught.filename}" if caught.filename else str(caught.strerror or caught)
    if caught.errno in FULL:
        return error(Code.STORAGE_FULL, where, what, "Free some space and try again; nothing was stored.")
    return error(Code.STORAGE_UNAVAILABLE, where, what, "Check the data directory and its permissions.")


@contextmanager
def _narrowed() -> Iterator[None]:
    try:
        yield
    except OSError as caught:
        raise storage_error(caught) from caught


def _copy(reader: BinaryIO, target: Path) -> str:
    """Copy to the disk for good and return the SHA-256 (hex) of what was written."""
    digest = hashlib.sha256()
    with target.open("wb", buffering=0) as writer:
        while piece := reader.read(CHUNK_BYTES):
            digest.update(piece)
            _write_all(writer, piece)
        os.fsync(writer.fileno())
    return digest.hexdigest()


def _write_all(writer: RawIOBase, piece: bytes) -> None:
    """A raw write may take less than it is given, at a limit for instance."""
    left = memoryview(piece)
    while left:
        left = left[writer.write(left) or 0 :]


def sync_folder(folder: Path) -> None:
    """Make a rename or a new folder durable: its entry lives in the folder above."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
