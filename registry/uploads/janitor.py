"""Letting go of what nobody needs: expired sessions, the bytes of closed ones, and blobs that came to no version.

A blob is stored before the row that needs it, so a process that ends in between leaves one that nobody needs. Until
its upload is closed or expires it is needed, for the upload may be finalized again; whoever closes an upload lets go
of its blobs in the same transaction. So nothing has to look for them in the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from adapterd.loader.errors import Unavailable
from adapterd.registry.blobs.interfaces import BlobStore
from adapterd.registry.catalog.models import VersionFileRow
from adapterd.registry.database import Clock, Database
from adapterd.registry.tenants.service import TenantService
from adapterd.registry.uploads.interfaces import UploadState
from adapterd.registry.uploads.models import UploadFileRow, UploadRow
from adapterd.registry.uploads.staging import StagingArea

_KEY = (UploadRow.tenant, UploadRow.id)


class Janitor:
    """For many threads and processes; two at once do no harm."""

    def __init__(
        self, db: Database, tenants: TenantService, staging: StagingArea, blobs: BlobStore, clock: Clock
    ) -> None:
        self._db = db
        self._tenants = tenants
        self._staging = staging
        self._blobs = blobs
        self._clock = clock

    def sweep(self) -> int:
        """Forget expired sessions with all that they left. Returns how many folders of staged bytes were removed.

        What cannot be let go of now, on a full disk or with a store that is away, is left to a later sweep: room is
        made first of all.
        """
        removed = self._remove_staged()
        for work in (self._forget_closed, self._forget_open, self._blobs.sweep):
            with suppress(Unavailable):  # `/readyz` says so; nothing depends on this
                work()
        return removed

    def let_go(self, session: Session, tenant: str, digests: Iterable[str]) -> None:
        """Delete the blobs among these that neither a version has nor an open upload may still bring into one.

        Call it last in a transaction that holds the tenant's lock, so that nobody begins to need one meanwhile.

        Raises:
            Unavailable: of the store.
        """
        left = set(digests) - _of_versions(session, tenant, digests)
        for sha256 in sorted(left - _handed_on(session, tenant, left)):
            self._blobs.delete(tenant, sha256)

    def forget(self, session: Session, row: UploadRow) -> None:
        """Remove a session's rows, and let go of its blobs. The caller holds the tenant's lock."""
        tenant, stored, digests = row.tenant, row.stored, _declared(session, row)
        session.execute(delete(UploadRow).where(UploadRow.tenant == tenant, UploadRow.id == row.id))
        if stored:
            self.let_go(session, tenant, digests)

    def forget_oldest_closed(self, session: Session, tenant: str, keep: int) -> None:
        """Of a tenant's sessions that are over, `keep` stay. The caller holds the tenant's lock."""
        over = (UploadRow.tenant == tenant, UploadRow.state != UploadState.OPEN)
        newest_first = select(UploadRow.id).where(*over).order_by(UploadRow.expires_at.desc(), UploadRow.id)
        old = list(session.scalars(newest_first.offset(keep)))
        if old:
            session.execute(delete(UploadRow).where(UploadRow.tenant == tenant, UploadRow.id.in_(old)))

    def let_go_of_stored(self, session: Session, row: UploadRow) -> None:
        """As `let_go`, of a session that was closed in this transaction. The store is asked only if it has any."""
        if row.stored:
            self.let_go(session, row.tenant, _declared(session, row))

    def let_go_of(self, tenant: str, digests: Iterable[str]) -> None:
        """As `let_go`, for who has no transaction open."""
        with self._db.write() as session:
            self._tenants.lock(session, tenant)
            self.let_go(session, tenant, digests)

    def _remove_staged(self) -> int:
        staged = self._staging.ids()  # before the rows: a folder is only ever made for a row that is there
        there = (UploadRow.state == UploadState.OPEN, UploadRow.expires_at > self._clock())
        with self._db.read() as session:
            held = set(session.scalars(select(UploadRow.id).where(*there)))
        for upload_id in staged - held:
            self._staging.remove(upload_id)
        return len(staged - held)

    def _forget_closed(self) -> None:
        """Who closed them has let go of their blobs."""
        over = (UploadRow.expires_at <= self._clock(), UploadRow.state != UploadState.OPEN)
        with self._db.write() as session:
            session.execute(delete(UploadRow).where(*over))

    def _forget_open(self) -> None:
        """One transaction each: a tenant is not kept waiting for all of another's."""
        over = (UploadRow.expires_at <= self._clock(), UploadRow.state == UploadState.OPEN)
        with self._db.read() as session:
            found = [(tenant, upload_id) for tenant, upload_id in session.execute(select(*_KEY).where(*over))]
        for tenant, upload_id in found:
            with self._db.write() as session:
                self._tenants.lock(session, tenant)
                row = session.get(UploadRow, (tenant, upload_id), populate_existing=True)
                if row is not None:
                    self.forget(session, row)


def _declared(session: Session, row: UploadRow) -> frozenset[str]:
    """SHA-256 of all that the upload is to bring."""
    of = (UploadFileRow.tenant == row.tenant, UploadFileRow.upload_id == row.id)
    return frozenset(session.scalars(select(UploadFileRow.sha256).where(*of)))


def _of_versions(session: Session, tenant: str, digests: Iterable[str]) -> set[str]:
    of = (VersionFileRow.tenant == tenant, VersionFileRow.sha256.in_(sorted(digests)))
    return set(session.scalars(select(VersionFileRow.sha256).where(*of)))


def _handed_on(session: Session, tenant: str, digests: Iterable[str]) -> set[str]:
    """Those that an open upload declares; it has blobs from now on, as if it had stored them."""
    same = (UploadFileRow.tenant == UploadRow.tenant) & (UploadFileRow.upload_id == UploadRow.id)
    heirs = select(UploadRow, UploadFileRow.sha256).join(UploadFileRow, same)
    found: set[str] = set()
    of = (UploadRow.tenant == tenant, UploadRow.state == UploadState.OPEN, UploadFileRow.sha256.in_(sorted(digests)))
    for row, sha256 in session.execute(heirs.where(*of)):
        row.stored = True
        found.add(sha256)
    session.flush()
    return found
