"""Upload sessions: opening, showing, receiving, closing.

A session's state changes in one transaction under the tenant's lock, from `open` to one final state, once.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from adapterd.loader.errors import Code, Conflict, Problem, error
from adapterd.loader.identity import FileEntry, canonical_json, sha256_hex
from adapterd.registry.database import Clock, Database
from adapterd.registry.errors import missing
from adapterd.registry.tenants.service import TenantService
from adapterd.registry.uploads.interfaces import NewUpload, StagingQuota, Upload, UploadFile, UploadState
from adapterd.registry.uploads.janitor import Janitor
from adapterd.registry.uploads.models import UploadFileRow, UploadRow
from adapterd.registry.uploads.staging import Receiver, StagingArea

ID_BYTES = 16  # 128 bits: nobody guesses an upload


class UploadService:
    """Sessions of all tenants. Callers have checked that the actor may do what they ask for."""

    def __init__(
        self,
        db: Database,
        tenants: TenantService,
        staging: StagingArea,
        janitor: Janitor,
        clock: Clock,
        lifetime: timedelta,
        quota: StagingQuota,
    ) -> None:
        self._db = db
        self._tenants = tenants
        self._staging = staging
        self._janitor = janitor
        self._clock = clock
        self._lifetime = lifetime
        self._quota = quota

    def check(self) -> None:
        """Returns if bytes can be taken now. Raises Unavailable."""
        self._staging.check()

    def create(self, tenant: str, new: NewUpload, *, actor: str, idempotency_key: str | None = None) -> Upload:
        """Open a session; with a key that was used before, the session that it opened then.

        Raises:
            NotFound: no such tenant.
            Conflict: CONFLICT when the key was used for another declaration.
            Refused: QUOTA_EXCEEDED when the tenant's open uploads would be too many or too large.
        """
        with self._db.write() as session:
            self._tenants.lock(session, tenant)
            known = _by_key(session, tenant, idempotency_key)
            if known is not None and self._expired(known):  # nobody has swept yet
                self._janitor.forget(session, known)
                known = None
            if known is not None:
                if known.request_digest != _request_digest(new):
                    raise _key_reused()
                return self._upload(known, _files(session, known))
            self._require_room(session, tenant, sum(f.size for f in new.files))
            self._janitor.forget_oldest_closed(session, tenant, self._quota.closed - 1)
            row = self._row(tenant, new, actor, idempotency_key)
            session.add(row)
            session.flush()
            files = [_file_row(row, position, entry) for position, entry in enumerate(new.files)]
            session.add_all(files)
            session.flush()
            return self._upload(row, files)

    def get(self, tenant: str, upload_id: str) -> Upload:
        """The session as it stands. Raises NotFound, also for one that has expired."""
        with self._db.read() as session:
            row = session.get(UploadRow, (tenant, upload_id))
            if row is None or self._expired(row):
                raise missing(upload_id)
            return self._upload(row, _files(session, row))

    @contextmanager
    def receiver(self, upload: Upload, path: str, offset: int) -> Iterator[Receiver]:
        """Take more bytes of one declared file. Raises NotFound, Conflict, Unavailable."""
        file = upload.file(path)
        if file is None:
            raise missing(path)
        if upload.state is not UploadState.OPEN:
            raise error(Code.CONFLICT, upload.id, f"the upload is {upload.state}", "Start a new upload.")
        with self._staging.receiver(upload.id, file, offset) as receiver:
            yield receiver

    def cancel(self, tenant: str, upload_id: str) -> None:
        """Forget a session and its bytes; an admitted version stays. Raises NotFound."""
        with self._db.write() as session:
            self._janitor.forget(session, self.lock(session, tenant, upload_id))
        self._staging.remove(upload_id)

    def refuse(self, upload: Upload, problems: tuple[Problem, ...]) -> Upload:
        """Close a session that must not become a version, and remove its bytes.

        One that somebody else closed first stays as it is.
        """
        with self._db.write() as session:
            row = self.lock(session, upload.tenant, upload.id)
            if row.state == UploadState.OPEN:
                row.state = UploadState.REFUSED
                row.problems = json.dumps([p.as_json() for p in problems])
            session.flush()
            closed = self._upload(row, _files(session, row))
            self._janitor.let_go_of_stored(session, row)
        self._staging.remove(upload.id)
        return closed

    def begin_storing(self, upload: Upload) -> None:
        """From now on there may be blobs of it. Raises NotFound."""
        with self._db.write() as session:
            self.lock(session, upload.tenant, upload.id).stored = True

    def lock(self, session: Session, tenant: str, upload_id: str) -> UploadRow:
        """The session's row, held until the transaction ends. Raises NotFound."""
        self._tenants.lock(session, tenant)
        row = session.get(UploadRow, (tenant, upload_id), populate_existing=True)
        if row is None or self._expired(row):
            raise missing(upload_id)
        return row

    def _require_room(self, session: Session, tenant: str, nbytes: int) -> None:
        """Raises Refused (QUOTA_EXCEEDED). Under the tenant's lock, so that two at once do not share the last place."""
        there = (UploadRow.tenant == tenant, UploadRow.state == UploadState.OPEN, UploadRow.expires_at > self._clock())
        uploads, ends = session.execute(select(func.count(), func.min(UploadRow.expires_at)).where(*there)).one()
        same = (UploadFileRow.tenant == UploadRow.tenant) & (UploadFileRow.upload_id == UploadRow.id)
        sizes = select(func.coalesce(func.sum(UploadFileRow.size), 0)).join(UploadRow, same)
        held = int(session.scalar(sizes.where(*there)) or 0)
        found = ""
        if uploads >= self._quota.uploads:
            found = f"{uploads} uploads of the tenant are open, at most {self._quota.uploads}"
        elif held + nbytes > self._quota.nbytes:
            found = f"{held} bytes are declared by open uploads of the tenant, {nbytes} more pass {self._quota.nbytes}"
        if found:
            when = f"; the oldest ends at {ends.isoformat()}" if ends else ""
            raise error(Code.QUOTA_EXCEEDED, "uploads", found, f"Finish or cancel one{when}.")

    def _expired(self, row: UploadRow) -> bool:
        return row.expires_at <= self._clock()

    def _row(self, tenant: str, new: NewUpload, actor: str, key: str | None) -> UploadRow:
        now: datetime = self._clock()
        return UploadRow(
            tenant=tenant, id=secrets.token_hex(ID_BYTES), adapter=new.adapter, base_id=new.base_id,
            base_revision=new.base_revision, allow=json.dumps(sorted(new.allow)), alias=new.alias,
            state=UploadState.OPEN, problems="[]", number=None, stored=False, idempotency_key=key,
            request_digest=_request_digest(new), created_by=actor, created_at=now,
            expires_at=now + self._lifetime,
        )  # fmt: skip

    def _upload(self, row: UploadRow, files: Iterable[UploadFileRow]) -> Upload:
        state = UploadState(row.state)
        return Upload(
            row.tenant, row.id, row.adapter, row.base_id, row.base_revision,
            tuple(self._file(f, state) for f in files), frozenset(map(Code, json.loads(row.allow))), row.alias,
            state, tuple(Problem.from_json(p) for p in json.loads(row.problems)), row.number, row.created_by,
            row.expires_at,
        )  # fmt: skip

    def _file(self, row: UploadFileRow, state: UploadState) -> UploadFile:
        """The bytes of an admitted upload are in the blobs, so all of them were received."""
        offset = row.size if state is UploadState.ADMITTED else self._staging.offset(row.upload_id, row.position)
        return UploadFile(row.position, FileEntry(row.path, row.sha256, row.size), offset)


def _by_key(session: Session, tenant: str, key: str | None) -> UploadRow | None:
    if key is None:
        return None
    query = select(UploadRow).where(UploadRow.tenant == tenant, UploadRow.idempotency_key == key)
    return session.scalar(query)


def _files(session: Session, row: UploadRow) -> list[UploadFileRow]:
    query = select(UploadFileRow).where(UploadFileRow.tenant == row.tenant, UploadFileRow.upload_id == row.id)
    return list(session.scalars(query.order_by(UploadFileRow.position)))


def _file_row(row: UploadRow, position: int, entry: FileEntry) -> UploadFileRow:
    return UploadFileRow(
        tenant=row.tenant,
        upload_id=row.id,
        position=position,
        path=entry.path,
        size=entry.size,
        sha256=entry.sha256,
    )


def _request_digest(new: NewUpload) -> str:
    """What makes two declarations the same."""
    body = {
        "adapter": new.adapter,
        "base": [new.base_id, new.base_revision],
        "files": [[f.path, f.sha256, f.size] for f in new.files],
        "allow": sorted(new.allow),
        "alias": new.alias,
    }
    return sha256_hex(canonical_json(body))


def _key_reused() -> Conflict:
    found = error(
        Code.CONFLICT,
        "Idempotency-Key",
        "this key was used for another upload",
        "Use a new key for a new upload.",
    )
    assert isinstance(found, Conflict)
    return found
