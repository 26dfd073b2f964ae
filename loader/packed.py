"""The packed form of a version, kept beside its verified files: a later load reads, hashes and copies.

    ROOT/<key>/packed/<dtype>-<page bytes>.image    the bytes, as the engine's pages have them
    ROOT/<key>/packed/<dtype>-<page bytes>.json     a line with a MAC, then the description it is made of

The description names the version, its manifest, the layout, and the seal of the bytes, a tag for each chunk
(`seal`). The tags are made of the bytes in memory that `pack` has just made of admitted chunks, they and the MAC with a
key that is not in the store; so whoever writes to the store's disk cannot have other bytes taken
(docs/adr/0005-the-store-remembers-under-a-key.md). Whatever does not hold is dropped, and the files are packed again.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import closing, suppress
from pathlib import Path

from adapterd.loader.formats.readers import MOST_PARTS, behind
from adapterd.loader.identity import VersionKey, canonical_json
from adapterd.loader.image import CHUNK_BYTES, PackedImage
from adapterd.loader.layout import Layout
from adapterd.loader.parallel import Helpers, for_each
from adapterd.loader.seal import Seal, Sealer
from adapterd.loader.store_folder import Entry, write_file
from adapterd.loader.store_key import StoreKey
from adapterd.loader.trust.strict_json import Fields, Malformed, parse

SCHEMA = "adapterd.packed/2"
"""Grows when `pack` comes to place values differently in the same layout."""

_MAX_DESCRIPTION_BYTES = 8 << 20
_LACKING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""What says nothing about a file that cannot be opened or read."""
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class _Mismatch(Exception):
    """The stored bytes are not those that were packed."""


class PackedForm:
    """One version's packed form for one layout. Methods raise OSError where they say so, and nothing else."""

    def __init__(self, entry: Entry, version: VersionKey, manifest_digest: str, layout: Layout, key: StoreKey) -> None:
        name = f"{layout.dtype}-{layout.page_bytes}"
        if len(layout.cuts):  # the ranks of a machine keep theirs beside each other
            name += f"-{layout.digest[:16]}"
        self._image = entry.packed / f"{name}.image"
        self._description = entry.packed / f"{name}.json"
        self._key = key
        self._facts = {
            "schema": SCHEMA,
            "version": version.path_digest(),
            "manifest_digest": manifest_digest,
            "layout": layout.digest,
        }
        self._about = canonical_json(self._facts)

    def read(self, image: PackedImage, threads: int, helpers: Helpers | None = None) -> bool:
        """Fill `image`, each chunk checked where it then lies; False, and `image` is garbage, if there is none that
        holds. One that does not hold is dropped; not one that this process has no descriptor or memory to read."""
        try:
            self._read(image, threads, helpers)
        except FileNotFoundError:
            return False
        except (_Mismatch, OSError) as fault:
            if not (isinstance(fault, OSError) and fault.errno in _LACKING):
                with suppress(OSError):
                    self.drop()
            return False
        return True

    def _read(self, image: PackedImage, threads: int, helpers: Helpers | None) -> None:
        seal = self._seal(image)
        sealer = Sealer(self._key, self._about, seal.salt)
        with closing(_File(self._image)) as file:
            file.must_have(image.nbytes)
            for_each(image.n_chunks, lambda index: file.take(image, index, sealer, seal.tags[index]), threads, helpers)

    def sealed(self, image: PackedImage, threads: int, helpers: Helpers | None = None) -> Seal:
        """The seal of what `image` holds now."""
        sealer, tags = Sealer(self._key, self._about), [""] * image.n_chunks

        def take(index: int) -> None:
            tags[index] = sealer.tag(index, image.chunk(index))

        for_each(image.n_chunks, take, threads, helpers)
        return Seal(sealer.salt, tuple(tags))

    def write(self, image: PackedImage, seal: Seal) -> None:
        """Keep `image`, which had this seal when it was packed. Needs the version's lock.

        The description goes in place last, so that a crash in between leaves none. Raises OSError.
        """
        self._image.parent.mkdir(mode=0o700, exist_ok=True)
        self._description.unlink(missing_ok=True)
        write_file(self._image, *image.parts(0, image.nbytes))
        body = canonical_json({**self._facts, "salt": seal.salt, "tags": list(seal.tags)})
        write_file(self._description, self._key.mac(body).encode() + b"\n" + body)

    def drop(self) -> None:
        """Remove it. Needs no lock: what is read stays open. Raises OSError."""
        self._description.unlink(missing_ok=True)
        self._image.unlink(missing_ok=True)

    def _seal(self, image: PackedImage) -> Seal:
        """Of the description, if this key made it for this version and layout. Nothing else of it is believed."""
        with closing(_File(self._description)) as file:
            data = file.start(_MAX_DESCRIPTION_BYTES)
        mac, _, body = data.partition(b"\n")
        if not self._key.made(mac.decode("latin-1"), body):
            raise _Mismatch
        try:
            found = Fields(parse(body), "", need={*self._facts, "salt", "tags"})
            for name, value in self._facts.items():
                found.exactly(name, value)
            salt, tags = found.hex64("salt"), found.items("tags", most=image.n_chunks)
        except Malformed as e:
            raise _Mismatch from e
        if len(tags) != image.n_chunks or not all(isinstance(tag, str) for tag in tags):
            raise _Mismatch
        return Seal(salt, tuple(tags))


class _File:
    """A file of the store, opened once. Raises OSError, or _Mismatch where it is no regular file."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, _OPEN)
        found = os.fstat(self._descriptor)
        self._size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise _Mismatch

    def must_have(self, size: int) -> None:
        """Raises _Mismatch unless the file has `size` bytes."""
        if self._size != size:
            raise _Mismatch

    def start(self, most: int) -> bytes:
        """The first `most` bytes: what is cut off has no MAC that holds."""
        return os.pread(self._descriptor, most, 0)

    def take(self, image: PackedImage, index: int, sealer: Sealer, tag: str) -> None:
        """Read a chunk into its place, and check it there. Raises _Mismatch.

        One call to read it and one a part to check it, each with the interpreter let go: threads that meet more
        often than that wait longer for each other than a chunk that has left the processor's cache costs.
        """
        at, parts = index * CHUNK_BYTES, image.chunk(index)
        left = parts
        while left:
            count = os.preadv(self._descriptor, left[:MOST_PARTS], at)
            if not count:
                raise _Mismatch
            at, left = at + count, behind(left, count)
        if not sealer.holds(index, parts, tag):
            raise _Mismatch

    def close(self) -> None:
        os.close(self._descriptor)
