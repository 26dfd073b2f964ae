"""The manifest that this worker read out of a version's files once: kept in memory, and beside them under its key.

Reading it anew (two parsers, the base's table, a digest over RFC 8785) takes this program 20 ms for 224 modules,
longer than all chunks take eight threads. What is kept counts only for the same version, statement, limits and
release of this program, and on disk only with a MAC that holds; else the files are read.
"""

from __future__ import annotations

import json
from functools import cache

import adapterd
from adapterd.loader.identity import VersionKey, canonical_json, sha256_hex
from adapterd.loader.limits import Limits
from adapterd.loader.manifest import Manifest
from adapterd.loader.recent import Recent
from adapterd.loader.store_folder import Entry, read_small, write_file
from adapterd.loader.store_key import StoreKey
from adapterd.loader.trust.admission import AdmissionStatement

SCHEMA = "adapterd.known-manifest/1"
_MAX_BYTES = 64 << 20

Recalled = Recent[bytes, Manifest]
"""Manifests in memory, by the facts that they are known for."""
MOST_RECALLED = 1 << 16
"""Modules of all of them together: about 50 MB, or 292 adapters of 224 modules."""


class KnownManifest:
    """One version's. Without a key it finds nothing on disk and keeps nothing there."""

    def __init__(
        self,
        entry: Entry,
        version: VersionKey,
        statement: AdmissionStatement,
        limits: Limits,
        key: StoreKey | None,
        recalled: Recalled,
    ) -> None:
        self._path, self._key, self._recalled = entry.path / "manifest.json", key, recalled
        self._start = _facts(version, statement, limits)

    def read(self) -> Manifest | None:
        """None if there is none for these very facts that can be read."""
        found = self._recalled.get(self._start)
        if found is None:
            found = self._read()
            if found is not None:
                self._recall(found)
        return found

    def _recall(self, manifest: Manifest) -> None:
        self._recalled.keep(self._start, manifest, len(manifest.modules))

    def _read(self) -> Manifest | None:
        if self._key is None:
            return None
        try:
            data = read_small(self._path, _MAX_BYTES) or b""
        except OSError:
            return None
        mac, _, body = data.partition(b"\n")
        if not body.startswith(self._start) or not self._key.made(mac.decode("latin-1"), body):
            return None
        return Manifest.from_json(json.loads(body[len(self._start) :]))

    def keep(self, manifest: Manifest) -> bool:
        """Keep the one that was just found to have the admitted digest; whether it is on disk. Needs the version's
        lock."""
        self._recall(manifest)
        if self._key is None:
            return False
        body = self._start + json.dumps(manifest.as_json()).encode()
        try:
            write_file(self._path, self._key.mac(body).encode() + b"\n" + body)
        except OSError:  # no room for it: the next load reads the files
            return False
        return True


def _facts(version: VersionKey, statement: AdmissionStatement, limits: Limits) -> bytes:
    facts = {
        "schema": SCHEMA,
        "release": _release(),
        "version": version.path_digest(),
        "manifest_digest": statement.manifest_digest,
        "allowed": list(statement.allowed),
        "limits": _limits(limits),
    }
    return canonical_json(facts) + b"\n"


@cache
def _limits(limits: Limits) -> str:
    return sha256_hex(repr(limits).encode())


@cache
def _release() -> str:
    """Another release may check more."""
    return adapterd.__version__
