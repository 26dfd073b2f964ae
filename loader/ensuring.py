"""How a version comes to be in the store, or is found there: the order in which it is verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import examine
from adapterd.loader.download import Origin, Progress, receive
from adapterd.loader.errors import Code, NotFound, Refused, Unavailable, Untrusted, error, error_from
from adapterd.loader.formats.files import DirectoryPackage
from adapterd.loader.identity import WEIGHTS_FILE, FileEntry, VersionKey
from adapterd.loader.known_manifest import KnownManifest, Recalled
from adapterd.loader.limits import Limits
from adapterd.loader.manifest import Manifest
from adapterd.loader.sources.interface import Resolved, Source
from adapterd.loader.store_files import check_sizes, hash_package
from adapterd.loader.store_folder import Entry, Evidence, StoreFolder
from adapterd.loader.store_key import StoreKey
from adapterd.loader.store_room import Room
from adapterd.loader.stored import StoredVersion
from adapterd.loader.trust.admission import AdmissionStatement
from adapterd.loader.trust.policy import TrustStore
from adapterd.loader.trust.seen import Seen
from adapterd.loader.trust.verify import TrustedVersion, Wanted


@dataclass(frozen=True, slots=True)
class Tools:
    """What all calls of `ensure` of one store share; see `VerifiedStore`."""

    folder: StoreFolder
    room: Room
    trust: TrustStore
    limits: Limits
    key: StoreKey | None
    clock: Callable[[], datetime]
    recalled: Recalled
    seen: Seen


class Ensuring:
    """One call of `ensure`, under the version's lock."""

    def __init__(
        self,
        tools: Tools,
        resolved: Resolved,
        source: Source,
        base: BaseSpec,
        *,
        progress: Progress,
        expect: Progress,
        recheck: bool,
    ) -> None:
        self._tools = tools
        self._folder, self._room = tools.folder, tools.room
        self._resolved = resolved
        self._origin = Origin(source, resolved)
        self._base = base
        self._progress, self._expect = progress, expect
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
            manifest = self._read(entry, trusted, hashed=hashed)
        except (Refused, Untrusted, NotFound):
            # Damaged or changed on disk. If the version itself is at fault, the fresh copy says so.
            self._folder.discard(self.name)
            return None
        if not marked:
            entry.mark(statement)
        self._room.used(entry)
        return StoredVersion(self.key, entry.package, manifest, trusted.checked, "disk")

    def from_source(self) -> StoredVersion:
        """A fresh copy; the local one, if any, is replaced only once all of it holds."""
        evidence = self._fetch_evidence()
        trusted = self._verify(evidence)
        statement = trusted.checked.statement
        self._check_budget(statement)
        with self._folder.incoming(self.name) as incoming:
            self._room.reserve(incoming, statement.total_bytes, partial(self._progress, 0))
            self._receive_all(statement, incoming.package, trusted)
            manifest = self._read(incoming, trusted, hashed=True)
            incoming.write_evidence(self._resolved.adapter, evidence)
            self._room.record(incoming)
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
        self._room.record(entry)
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
        trusted = TrustedVersion(wanted, self._tools.trust, self._tools.clock(), self._tools.seen)
        trusted.update_statement(evidence.statement)
        trusted.update_signature(evidence.signature)
        return trusted

    # --- files

    def _check_budget(self, statement: AdmissionStatement) -> None:
        limits = self._tools.limits
        for name, found, most in [
            ("files", len(statement.files), limits.max_files),
            ("bytes", statement.total_bytes, limits.max_total_bytes),
        ]:
            if found > most:
                message = f"the version has {found} {name}, this worker takes at most {most}"
                raise error(Code.QUOTA_EXCEEDED, name, message)
        self._room.check(statement.total_bytes)

    def _receive_all(self, statement: AdmissionStatement, package: Path, trusted: TrustedVersion) -> None:
        self._expect(statement.total_bytes)
        found: list[FileEntry] = []
        chunks: tuple[str, ...] = ()
        for wanted in statement.files:
            target = package / wanted.path
            entry, listed = receive(self._origin, statement, wanted, target, self._progress)
            found.append(entry)
            chunks = listed if wanted.path == WEIGHTS_FILE else chunks
        trusted.update_files(found, chunks)

    def _read(self, entry: Entry, trusted: TrustedVersion, *, hashed: bool) -> Manifest:
        """The manifest of the entry's files, if it is the admitted one.

        Args:
            hashed: all bytes were hashed before, so names and sizes will do; if not, they are hashed first.
        """
        statement = trusted.checked.statement
        tools = self._tools
        known = KnownManifest(entry, self.key, statement, tools.limits, tools.key, tools.recalled)
        with DirectoryPackage.open_dir(entry.package, self._tools.limits) as package:
            check_sizes(package, statement)
            if not hashed:
                self._expect(statement.total_bytes)
                trusted.update_files(*hash_package(package, self._progress))
            found = known.read() if hashed and not self._recheck else None
            if found is not None:
                trusted.update_manifest(statement.manifest_digest)  # a fact of what is known
                return found
            verdict = examine(
                package,
                self._base,
                limits=self._tools.limits,
                files=statement.files,
                allow=frozenset(code for code in Code if code.value in statement.allowed),
                content=self._recheck,
            )
        if verdict.manifest is None:
            raise error_from(verdict.problems)
        trusted.update_manifest(verdict.manifest.digest)
        if not self._recheck and known.keep(verdict.manifest):
            self._room.record(entry)
        return verdict.manifest
