"""Finalizing: a complete upload becomes a version or is refused, whatever else happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from adapterd.loader.errors import Code, Conflict, NotFound, Problem, Refused, Untrusted, error
from adapterd.loader.trust.admission import NO_PUBLISHER
from adapterd.loader.trust.keys import PrivateKey
from adapterd.registry.admission import (
    Passed,
    attest,
    check,
    hash_files,
    registered_base,
    require_complete,
    verify_signature,
)
from adapterd.registry.audit.service import AuditLog
from adapterd.registry.base_models.service import BaseModelService
from adapterd.registry.blobs.interfaces import BlobStore
from adapterd.registry.catalog.aliases import AliasService
from adapterd.registry.catalog.interfaces import NewVersion
from adapterd.registry.catalog.models import VersionRow
from adapterd.registry.catalog.versions import VersionService
from adapterd.registry.database import Clock, Database
from adapterd.registry.keys.service import KeyService
from adapterd.registry.tenants.service import TenantService
from adapterd.registry.uploads.interfaces import Upload, UploadState
from adapterd.registry.uploads.janitor import Janitor
from adapterd.registry.uploads.service import UploadService
from adapterd.registry.uploads.staging import StagedPackage, StagingArea


class Announcer(Protocol):
    """Who is told what became of an upload. Must not raise: it is done."""

    def admitted(self, upload: Upload) -> None: ...

    def refused(self, upload: Upload) -> None: ...


class Admission:
    """Takes a complete upload through the stages of `registry.admission`; for many threads and processes."""

    def __init__(
        self,
        *,
        db: Database,
        uploads: UploadService,
        staging: StagingArea,
        janitor: Janitor,
        tenants: TenantService,
        keys: KeyService,
        base_models: BaseModelService,
        blobs: BlobStore,
        versions: VersionService,
        aliases: AliasService,
        audit: AuditLog,
        key: PrivateKey,
        clock: Clock,
        announcer: Announcer,
    ) -> None:
        self._db = db
        self._uploads = uploads
        self._staging = staging
        self._janitor = janitor
        self._tenants = tenants
        self._keys = keys
        self._base_models = base_models
        self._blobs = blobs
        self._versions = versions
        self._aliases = aliases
        self._audit = audit
        self._key = key
        self._clock = clock
        self._announcer = announcer
        self._guard = threading.Lock()
        self._running: set[str] = set()

    def finalize(self, tenant: str, upload_id: str, *, actor: str) -> Upload:
        """Make a version of a complete upload, or refuse it; what is closed already stays as it is.

        While somebody else is at it, the answer is the upload as PROCESSING.

        Raises:
            NotFound: no such upload.
            Conflict: UPLOAD_INCOMPLETE; VERSION_WITHDRAWN for an alias to content that was withdrawn.
            Unavailable: the upload stays open, and the same call may work later.
        """
        with self.alone(upload_id) as alone:
            if alone:
                return self.finish(tenant, upload_id, actor=actor)
            return unless_closed(self._uploads.get(tenant, upload_id))

    def finish(self, tenant: str, upload_id: str, *, actor: str) -> Upload:
        """As `finalize`, for who is `alone` at it."""
        upload = self._uploads.get(tenant, upload_id)
        if upload.state is not UploadState.OPEN:
            return upload
        require_complete(upload)
        try:
            return self._admit(upload, actor)
        except NotFound:  # forgotten meanwhile, and who forgot it could not know what was stored afterwards
            self._janitor.let_go_of(tenant, {f.declared.sha256 for f in upload.files})
            raise

    @contextmanager
    def alone(self, upload_id: str) -> Iterator[bool]:
        """Whether nobody else in this process is finalizing. Saves work; the transaction is what decides."""
        with self._guard:
            alone = upload_id not in self._running
            self._running.add(upload_id)
        try:
            yield alone
        finally:
            if alone:
                with self._guard:
                    self._running.discard(upload_id)

    def view(self, upload: Upload) -> Upload:
        """The upload, PROCESSING while this process finalizes it."""
        return unless_closed(upload) if upload.id in self._running else upload

    def refuse(self, upload: Upload, problems: tuple[Problem, ...]) -> Upload:
        """Close an upload that must not become a version."""
        closed = self._uploads.refuse(upload, problems)
        self._announcer.refused(closed)
        return closed

    def _admit(self, upload: Upload, actor: str) -> Upload:
        try:
            with self._staging.package(upload.id, upload.files) as package:
                passed = self._examine(upload, package)
                self._uploads.begin_storing(upload)
                self._store(upload)
        except (Refused, Untrusted) as caught:
            return self.refuse(upload, caught.problems)
        except FileNotFoundError:
            return self._vanished(upload)
        except NotFound as caught:
            if caught.code is Code.PATH_NOT_FOUND:  # as a blob store says it
                return self._vanished(upload)
            raise
        try:
            closed = self._record(upload, passed, actor)
        except Conflict as caught:
            if caught.code is Code.ALREADY_EXISTS:  # it will never do, unlike an alias to a withdrawn version
                return self.refuse(upload, caught.problems)
            raise
        self._staging.remove(upload.id)
        self._announcer.admitted(closed)
        return closed

    def _examine(self, upload: Upload, package: StagedPackage) -> Passed:
        policy = self._tenants.policy(upload.tenant)
        base = registered_base(self._base_models, upload.base_id, upload.base_revision)
        hashed = hash_files(package, upload)
        active, revoked = self._keys.active(upload.tenant), self._keys.revoked(upload.tenant)
        signer = verify_signature(package, hashed, policy, active, revoked)
        verdict = check(package, hashed, base, upload, policy)
        assert verdict.manifest is not None
        return Passed(base, policy, hashed, signer, verdict.manifest, verdict.problems)

    def _store(self, upload: Upload) -> None:
        """Blobs come before the row: one without a row is garbage, a row without its blobs would be a lie."""
        for file in upload.files:
            self._blobs.put(upload.tenant, file.declared.sha256, self._staging.path(upload.id, file))

    def _record(self, upload: Upload, passed: Passed, actor: str) -> Upload:
        """One transaction. Of two that got here at once, the second changes nothing."""
        with self._db.write() as session:
            row = self._uploads.lock(session, upload.tenant, upload.id)
            if row.state == UploadState.OPEN:
                self._require_blobs(upload)
                number = self._versions.record(
                    session, upload.tenant, _new_version(upload, passed),
                    lambda n: attest(upload, n, passed, self._key, self._clock()), actor=actor,
                )  # fmt: skip
                if upload.alias is not None:
                    version = session.get_one(VersionRow, (upload.tenant, upload.adapter, number))
                    self._aliases.point(session, upload.tenant, upload.alias, version, actor=actor)
                row.state, row.number = UploadState.ADMITTED, number
                session.flush()
                self._audit.append(
                    session, tenant=upload.tenant, actor=actor, action="version.admit",
                    target=f"{upload.adapter}/{number}", detail=_audit_detail(upload, passed),
                )  # fmt: skip
            # Of content that is a version already, another signature is stored and needed by nobody.
            self._janitor.let_go(session, upload.tenant, {f.declared.sha256 for f in upload.files})
        return self._uploads.get(upload.tenant, upload.id)

    def _require_blobs(self, upload: Upload) -> None:
        """Under the tenant's lock, as deletes are: who closed the upload may have deleted some, and was undone."""
        for file in upload.files:
            if self._blobs.size(upload.tenant, file.declared.sha256) is None:
                raise error(
                    Code.STORAGE_UNAVAILABLE, file.declared.path, "its stored bytes went away meanwhile",
                    "Finalize again: they are stored anew.",
                )  # fmt: skip

    def _vanished(self, upload: Upload) -> Upload:
        """The staged bytes are gone: another process closed the upload, or somebody cleared the disk."""
        now = self._uploads.get(upload.tenant, upload.id)
        if now.closed:  # whoever closed it could not know what was stored afterwards
            self._janitor.let_go_of(upload.tenant, {f.declared.sha256 for f in upload.files})
        if now.state is UploadState.OPEN:
            require_complete(now)
        return now


def unless_closed(upload: Upload) -> Upload:
    """The upload as who is not alone at it is told: PROCESSING, unless it is closed."""
    return upload if upload.closed else replace(upload, state=UploadState.PROCESSING)


def _new_version(upload: Upload, passed: Passed) -> NewVersion:
    return NewVersion(
        adapter=upload.adapter,
        base=passed.base.pin,
        files=passed.hashed.content,
        signature=passed.hashed.signature,
        publisher=passed.signer.key_id if passed.signer else NO_PUBLISHER,
        manifest=passed.manifest,
        warnings=passed.warnings,
    )


def _audit_detail(upload: Upload, passed: Passed) -> dict[str, str | None]:
    return {
        "upload": upload.id,
        "version_digest": passed.manifest.version_digest,
        "publisher": passed.signer.key_id if passed.signer else NO_PUBLISHER,
        "alias": upload.alias,
    }
