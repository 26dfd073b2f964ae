"""The verified local store: what a worker keeps on disk, and the only way into it.

A version comes in like this: statement and signature are verified, the files are hashed while they are
written and compared with both, and only then is anything parsed. The mark is written last. Opening a
marked version verifies statement and signature again, against the trust store as it is now, without
reading a tensor; chunk digests are checked where the bytes are packed (`pack`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import examine
from adapterd.loader.download import Origin, Progress, receive
from adapterd.loader.errors import Code, NotFound, Refused, Unavailable, Untrusted, error, error_from
from adapterd.loader.formats.files import DirectoryPackage, blocks
from adapterd.loader.identity import WEIGHTS_FILE, BasePin, FileEntry, VersionKey
from adapterd.loader.limits import DEFAULT_LIMITS, Limits
from adapterd.loader.manifest import Manifest
from adapterd.loader.sources.interface import Resolved, Source
from adapterd.loader.store_folder import Entry, Evidence, StoreFolder, narrowed
from adapterd.loader.trust.admission import AdmissionStatement
from adapterd.loader.trust.chunks import ChunkHasher
from adapterd.loader.trust.policy import TrustStore
from adapterd.loader.trust.verify import Checked, TrustedVersion, Wanted


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version that may be packed.

    Attributes:
        key: its identity.
        directory: holds exactly the statement's files.
        manifest: read from those files just now, and equal to the admitted one.
        statement, checked: what was verified just now.
        source: whether its bytes were fetched by this call or were here already.
    """

    key: VersionKey
    directory: Path
    manifest: Manifest
    checked: Checked
    source: Literal["downloaded", "disk"]

    @property
    def statement(self) -> AdmissionStatement:
        return self.checked.statement


class VerifiedStore:
    """Verified versions under one folder; threads and processes may share it.

    Args:
        root: made if it is not there; what a crash left half done is swept here.
        trust: consulted at every `ensure`, so that a change in it counts at once.
        limits: caps on what a statement may make this host fetch.
        clock: the time, with its zone.

    Raises:
        Unavailable: STORAGE_UNAVAILABLE.
    """

    def __init__(
        self,
        root: Path,
        trust: TrustStore,
        limits: Limits = DEFAULT_LIMITS,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.trust = trust
        self._limits = limits
        self._clock = clock
        self._folder = StoreFolder(root)

    def ensure(
        self,
        resolved: Resolved,
        source: Source,
        base: BaseSpec,
        *,
        progress: Progress | None = None,
        recheck: bool = False,
    ) -> StoredVersion:
        """The version, verified, from disk if it is here and from `source` if it is not.

        A local copy that does not hold is replaced by a fresh one. Two callers that want the same version
        at once: the second waits and finds it there.

        Args:
            base: of the model that is served; another pin than the version's is a refusal.
            progress: called with the number of bytes fetched or hashed since the last call, 0 while another
                thread or process has the version or the source is being asked. What it raises gives up.
            recheck: hash all bytes again and repeat the content checks (finite, effect).

        Raises:
            Untrusted: what `TrustedVersion` raises, CHUNK_MISMATCH.
            Refused: BASE_MISMATCH, BASE_REVISION_MISMATCH, QUOTA_EXCEEDED, HASH_MISMATCH, or the checks'.
            NotFound, Conflict, Unavailable: the source's. Unavailable: STORAGE_FULL, STORAGE_UNAVAILABLE.
        """
        check_pin(resolved.base, base.pin)
        watch = progress or _no_progress
        loading = _Loading(self, resolved, source, base, progress=watch, recheck=recheck)
        with narrowed(self._folder.root), self._folder.locked(loading.name, partial(watch, 0)):
            return loading.from_disk() or loading.from_source()

    def doubt(self, key: VersionKey) -> None:
        """After CHUNK_MISMATCH, say: the next `ensure` hashes the copy, and replaces it if it does not hold.

        It is not removed here: another process may have replaced it meanwhile, or be reading it.
        """
        with narrowed(self._folder.root):
            self._folder.unmark(key.path_digest())


def check_pin(version: BasePin, served: BasePin) -> None:
    """Raises Refused (BASE_MISMATCH, BASE_REVISION_MISMATCH) unless the version is for the served base."""
    for code, field in [
        (Code.BASE_MISMATCH, "id"),
        (Code.BASE_REVISION_MISMATCH, "revision"),
        (Code.BASE_MISMATCH, "module_table_digest"),
    ]:
        wanted, found = getattr(version, field), getattr(served, field)
        if wanted != found:
            message = f"the version is for {wanted}, the base model that is served has {found}"
            raise error(code, f"base.{field}", message, "Ask for a version for this base model.")


def _no_progress(_: int) -> None:
    """Nobody watches."""


class _Loading:
    """One call of `ensure`, under the version's lock."""

    def __init__(
        self,
        store: VerifiedStore,
        resolved: Resolved,
        source: Source,
        base: BaseSpec,
        *,
        progress: Progress,
        recheck: bool,
    ) -> None:
        self._store = store
        self._folder = store._folder
        self._resolved = resolved
        self._origin = Origin(source, resolved)
        self._base = base
        self._progress = progress
        self._recheck = recheck
        self.key = VersionKey(resolved.tenant, base.pin, resolved.version_digest)
        self.name = self.key.path_digest()

    # --- the two ways

    def from_disk(self) -> StoredVersion | None:
        """The local copy, or None if there is none that holds."""
        entry = self._folder.entry(self.name)
        if not entry.package.is_dir():
            return None
        trusted = self._trusted_evidence(entry)
        statement = trusted.checked.statement
        marked = entry.is_marked_for(statement)
        hashed = marked and not self._recheck
        if hashed:
            trusted.files_were_marked()
        try:
            manifest = self._read(entry.package, trusted, hashed=hashed)
        except (Refused, Untrusted, NotFound):
            # Damaged or changed on disk. If the version itself is at fault, the fresh copy says so.
            self._folder.discard(self.name)
            return None
        if not marked:
            entry.mark(statement)
        return StoredVersion(self.key, entry.package, manifest, trusted.checked, "disk")

    def from_source(self) -> StoredVersion:
        """A fresh copy; the local one, if any, is replaced only once all of it holds."""
        evidence = self._fetch_evidence()
        trusted = self._verify(evidence)
        statement = trusted.checked.statement
        self._check_budget(statement)
        with self._folder.incoming(self.name) as incoming:
            self._receive_all(statement, incoming.package, trusted)
            manifest = self._read(incoming.package, trusted, hashed=True)
            incoming.write_evidence(self._resolved.adapter, evidence)
            kept = self._folder.keep(incoming, self.name)
        kept.mark(statement)
        return StoredVersion(self.key, kept.package, manifest, trusted.checked, "downloaded")

    # --- statement and signature

    def _trusted_evidence(self, entry: Entry) -> TrustedVersion:
        """From disk if it still holds; else the source may have newer (re-signed after a revocation)."""
        kept = entry.read_evidence(self._resolved.adapter)
        if kept is None:
            return self._renewed_evidence(entry)
        try:
            return self._verify(kept)
        except Untrusted:
            try:
                return self._renewed_evidence(entry)
            except (Unavailable, NotFound):
                pass
            raise

    def _renewed_evidence(self, entry: Entry) -> TrustedVersion:
        evidence = self._fetch_evidence()
        trusted = self._verify(evidence)
        entry.write_evidence(self._resolved.adapter, evidence)
        return trusted

    def _fetch_evidence(self) -> Evidence:
        source = self._origin.source
        statement = source.statement(self._resolved)
        self._progress(0)
        evidence = Evidence(statement, source.signature(self._resolved))
        self._progress(0)
        return evidence

    def _verify(self, evidence: Evidence) -> TrustedVersion:
        r = self._resolved
        wanted = Wanted(r.tenant, r.adapter, self._base.pin, r.version_digest, r.version_number)
        trusted = TrustedVersion(wanted, self._store.trust, self._store._clock())
        trusted.update_statement(evidence.statement)
        trusted.update_signature(evidence.signature)
        return trusted

    # --- files

    def _check_budget(self, statement: AdmissionStatement) -> None:
        limits = self._store._limits
        for name, found, most in [
            ("files", len(statement.files), limits.max_files),
            ("bytes", statement.total_bytes, limits.max_total_bytes),
        ]:
            if found > most:
                message = f"the version has {found} {name}, this worker takes at most {most}"
                raise error(Code.QUOTA_EXCEEDED, name, message)

    def _receive_all(self, statement: AdmissionStatement, package: Path, trusted: TrustedVersion) -> None:
        found: list[FileEntry] = []
        chunks: tuple[str, ...] = ()
        for wanted in statement.files:
            target = package / wanted.path
            entry, listed = receive(self._origin, statement, wanted, target, self._progress)
            found.append(entry)
            chunks = listed if wanted.path == WEIGHTS_FILE else chunks
        trusted.update_files(found, chunks)

    def _read(self, path: Path, trusted: TrustedVersion, *, hashed: bool) -> Manifest:
        """The manifest of the files under `path`, if it is the admitted one.

        Args:
            hashed: all bytes were hashed before, so names and sizes will do; if not, they are hashed first.
        """
        statement = trusted.checked.statement
        with DirectoryPackage.open_dir(path, self._store._limits) as package:
            _check_sizes(package, statement)
            if not hashed:
                trusted.update_files(*_hash(package, self._progress))
            verdict = examine(
                package,
                self._base,
                limits=self._store._limits,
                files=statement.files,
                allow=frozenset(code for code in Code if code.value in statement.allowed),
                content=self._recheck,
            )
        if verdict.manifest is None:
            raise error_from(verdict.problems)
        trusted.update_manifest(verdict.manifest.digest)
        return verdict.manifest


def _check_sizes(package: DirectoryPackage, statement: AdmissionStatement) -> None:
    """Raises Untrusted (MANIFEST_NOT_EXACT) or Refused (HASH_MISMATCH)."""
    found = package.sizes()
    wanted = {f.path: f.size for f in statement.files}
    for name in sorted(found.keys() ^ wanted.keys()):
        raise error(Code.MANIFEST_NOT_EXACT, name, "the stored files are not those that were admitted")
    for name, size in wanted.items():
        if found[name] != size:
            raise error(Code.HASH_MISMATCH, name, f"{found[name]} bytes, {size} were admitted")


def _hash(package: DirectoryPackage, progress: Progress) -> tuple[list[FileEntry], tuple[str, ...]]:
    """All files, and the chunks of the tensor file, in one pass."""
    found: list[FileEntry] = []
    chunks: tuple[str, ...] = ()
    for name in package.names():
        reader, hasher = package.open(name), ChunkHasher()
        for block in blocks(reader):
            hasher.update(block)
            progress(len(block))
        digest, listed = hasher.finish()
        found.append(FileEntry(name, digest, reader.size))
        chunks = listed if name == WEIGHTS_FILE else chunks
    return found, chunks
