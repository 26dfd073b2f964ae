"""A folder of pulled versions: for hosts without a network, and for tests.

    ROOT/<tenant>/<name>/<number>/                      the package, with model.sig if it is signed
    ROOT/<tenant>/<name>/<number>.admission.dsse.json   what `adapterctl pull` puts beside it
    ROOT/<tenant>/<name>/aliases.json                   {"default": 1, "prod": 2}

The folder is a source like any other: nothing in it is believed before the trust core has checked it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Self

from adapterd.loader.errors import AdapterdError, Code, Untrusted, error
from adapterd.loader.identity import NAME_PATTERN, SIGNATURE_FILE, Ref
from adapterd.loader.recent import Recent
from adapterd.loader.sources.interface import Resolved, check_alias_digest, not_found
from adapterd.loader.trust.admission import MAX_ENVELOPE_BYTES, AdmissionStatement, read_unverified
from adapterd.loader.trust.oms import MAX_BUNDLE_BYTES
from adapterd.loader.trust.strict_json import Malformed, parse

ALIASES_FILE = "aliases.json"
STATEMENT_SUFFIX = ".admission.dsse.json"
MAX_ALIASES_BYTES = 1 << 20
MOST_READ = 16 << 20
"""Bytes of statements whose contents are kept in memory."""
_BLOCK_BYTES = 1 << 20
_NUMBER = re.compile(r"[1-9][0-9]{0,15}")
_NAME = re.compile(NAME_PATTERN)


class FolderSource:
    """Implements `Source` over a folder; see the module for its layout."""

    def __init__(self, root: Path | str) -> None:
        self._root = Path(root)
        self._read: Recent[bytes, AdmissionStatement] = Recent(MOST_READ)

    @property
    def root(self) -> Path:
        """The folder, as it was given."""
        return self._root

    def resolve(self, ref: Ref, tenant: str) -> Resolved:
        if ref.tenant != tenant:
            raise not_found(ref)  # whether it is there is not even looked up
        alias = ref.wanted_alias
        if alias is None:
            number, statement = self._find_digest(ref)
        else:
            number = self._find_alias(ref, alias)
            statement = self._unverified(ref, number)
            check_alias_digest(ref, statement.version_digest)
        digest = statement.version_digest
        return Resolved(replace(ref, digest=digest), ref.tenant, ref.name, digest, number, statement.base)

    def statement(self, version: Resolved) -> bytes:
        return self._statement_bytes(version.ref, version.version_number)

    def signature(self, version: Resolved) -> bytes | None:
        return _read_small(self._package(version) / SIGNATURE_FILE, MAX_BUNDLE_BYTES)

    @contextmanager
    def read(self, version: Resolved, path: str, offset: int = 0) -> Iterator[Iterator[bytes]]:
        if Path(path).name != path:
            raise ValueError(f"{path!r} is not a plain file name")
        file = _open(self._package(version) / path)
        if file is None:
            raise error(Code.NOT_FOUND, path, "the version does not hold this file")
        with file:
            file.seek(offset)
            yield _blocks(file, path)

    def close(self) -> None:
        """Nothing is held open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the layout

    def _adapter(self, ref: Ref) -> Path:
        # Both names have the grammar of identity.NAME_PATTERN: no separator, no leading dot.
        for name in (ref.tenant, ref.name):
            if not _NAME.fullmatch(name):
                raise not_found(ref)
        return self._root / ref.tenant / ref.name

    def _package(self, version: Resolved) -> Path:
        return self._adapter(version.ref) / str(version.version_number)

    def _statement_bytes(self, ref: Ref, number: int) -> bytes:
        path = self._adapter(ref) / f"{number}{STATEMENT_SUFFIX}"
        data = _read_small(path, MAX_ENVELOPE_BYTES)
        if data is None:
            raise error(
                Code.STATEMENT_MISSING, str(path), "this version has no admission statement",
                "Fetch it again with `adapterctl pull`, which writes the statement beside the package.",
            )  # fmt: skip
        return data

    def _unverified(self, ref: Ref, number: int) -> AdmissionStatement:
        """What the bytes that lie there now say; the same bytes are parsed once."""
        data = self._statement_bytes(ref, number)
        at = hashlib.sha256(data).digest()
        found = self._read.get(at)
        if found is None:
            found = read_unverified(data)
            self._read.keep(at, found, len(data))
        return found

    def _find_alias(self, ref: Ref, alias: str) -> int:
        path = self._adapter(ref) / ALIASES_FILE
        data = _read_small(path, MAX_ALIASES_BYTES)
        if data is None:
            raise not_found(ref)
        number = _parse_aliases(data, path).get(alias)
        if number is None:
            raise not_found(ref)
        return number

    def _find_digest(self, ref: Ref) -> tuple[int, AdmissionStatement]:
        for number in self._numbers(ref):
            try:
                statement = self._unverified(ref, number)
            except Untrusted:
                continue  # a broken neighbour is not what was asked for
            if statement.version_digest == ref.digest:
                return number, statement
        raise not_found(ref)

    def _numbers(self, ref: Ref) -> list[int]:
        try:
            names = [entry.name for entry in self._adapter(ref).iterdir()]
        except FileNotFoundError:
            return []
        except OSError as e:
            raise _unreadable(self._adapter(ref), e) from e
        return sorted((int(n) for n in names if _NUMBER.fullmatch(n)), reverse=True)


def _parse_aliases(data: bytes, path: Path) -> dict[str, int]:
    try:
        value = parse(data)
    except Malformed as e:
        raise error(Code.REQUEST_INVALID, str(path), str(e)) from e
    if not isinstance(value, dict) or not all(type(n) is int and n > 0 for n in value.values()):
        raise error(Code.REQUEST_INVALID, str(path), 'must map aliases to version numbers, like {"prod": 2}')
    return value


def _open(path: Path) -> BinaryIO | None:
    """A regular file, never through a link at its last step; None if it is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise _unreadable(path, e) from e
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(Code.ARCHIVE_SPECIAL_FILE, str(path), "is not a regular file")
    return os.fdopen(descriptor, "rb")


def _read_small(path: Path, most: int) -> bytes | None:
    """At most `most` bytes and one more, so that the parser sees that it is too large."""
    file = _open(path)
    if file is None:
        return None
    with file:
        return b"".join(_blocks(file, str(path), most + 1))


def _blocks(file: BinaryIO, name: str, most: int | None = None) -> Iterator[bytes]:
    left = most
    while left is None or left > 0:
        try:
            data = file.read(_BLOCK_BYTES if left is None else min(_BLOCK_BYTES, left))
        except OSError as e:
            raise _unreadable(Path(name), e) from e
        if not data:
            return
        left = None if left is None else left - len(data)
        yield data


def _unreadable(path: Path, failure: OSError) -> AdapterdError:
    return error(Code.STORAGE_UNAVAILABLE, str(path), f"cannot be read: {failure.strerror}")
