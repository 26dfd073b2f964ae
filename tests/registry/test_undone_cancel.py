"""A cancel whose transaction was undone after it had deleted blobs: no version comes of what is left."""

from __future__ import annotations

import io
from datetime import timedelta
from pathlib import Path

import pytest

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.trust.keys import generate_admission_key
from adapterd.registry import schema
from adapterd.registry.api.lanes import Lanes
from adapterd.registry.api.observe import Observer
from adapterd.registry.app import build_context
from adapterd.registry.blobs.local import LocalBlobs
from adapterd.registry.database import Database, utcnow
from adapterd.registry.services import build_services
from adapterd.registry.uploads.interfaces import NewUpload, StagingQuota, UploadState
from adapterd.registry.uploads.staging import StagingArea
from fakes.registry_world import make_package, seed_registry


class FailsAtTheSecond(LocalBlobs):
    """A store that deletes one blob and is away then."""

    left = 1

    def delete(self, tenant: str, sha256: str) -> None:
        if not self.left:
            raise error(Code.STORAGE_UNAVAILABLE, "blobs", "the store is away")
        self.left -= 1
        super().delete(tenant, sha256)


def test_a_version_needs_its_blobs_when_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db, blobs = Database(f"sqlite:///{tmp_path / 'r.sqlite3'}"), FailsAtTheSecond(tmp_path / "blobs")
    schema.upgrade(db)
    context = build_context(
        build_services(db, bytes(range(32)), utcnow), blobs=blobs, staging=StagingArea(tmp_path / "up"),
        key=generate_admission_key(), observer=Observer(io.StringIO()), clock=utcnow,
        upload_lifetime=timedelta(hours=1), upload_quota=StagingQuota(), lanes=Lanes(2),
    )  # fmt: skip
    seed = seed_registry(context.services)
    package = make_package(tmp_path / "package").signed(seed.tenants["acme"][1])
    wanted = NewUpload("finance", package.base.id, package.base.revision, tuple(package.entries), frozenset(), None)
    upload = context.uploads.create("acme", wanted, actor="t")
    for name, data in package.files.items():
        with context.uploads.receiver(upload, name, 0) as receiver:
            receiver.take(data)
    stored = context.admission._store

    def cancelled_meanwhile(each: object) -> None:
        stored(each)  # type: ignore[arg-type]
        with pytest.raises(AdapterdError, match="away"):
            context.uploads.cancel("acme", upload.id)

    monkeypatch.setattr(context.admission, "_store", cancelled_meanwhile)
    with pytest.raises(AdapterdError) as caught:
        context.admission.finalize("acme", upload.id, actor="t")
    assert caught.value.code is Code.STORAGE_UNAVAILABLE
    monkeypatch.undo()
    admitted = context.admission.finalize("acme", upload.id, actor="t")
    assert admitted.state is UploadState.ADMITTED
    assert all(blobs.size("acme", file.declared.sha256) is not None for file in admitted.files)
    db.dispose()
