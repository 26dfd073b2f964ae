"""A process that dies between any two steps leaves an open upload or an admitted version, nothing between (I23)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adapterd.loader.trust.keys import PrivateKey
from adapterd.registry.api.context import Context
from adapterd.registry.audit.service import AuditLog
from adapterd.registry.blobs.interfaces import BlobStore
from adapterd.registry.services import Services
from adapterd.registry.uploads.interfaces import Upload
from adapterd.registry.uploads.staging import StagingArea
from fakes.clock import FakeClock
from fakes.registry_world import Package, Seed, World


class Killed(BaseException):
    """The process ends here: nothing that the program catches."""


class DyingBlobs:
    """A store whose process dies before, or after, the n-th put."""

    def __init__(self, inner: BlobStore, puts: int) -> None:
        self._inner = inner
        self._left = puts

    def put(self, *arguments: Any) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1
        self._inner.put(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class DyingKey:
    """An admission key whose process dies while it signs."""

    def __init__(self, key: PrivateKey) -> None:
        self.public = key.public
        self.algorithm = key.algorithm

    def sign(self, _data: bytes) -> bytes:
        raise Killed


class DyingAudit(AuditLog):
    """A log whose process dies when a version is admitted, the last thing before the commit."""

    def append(self, session: Any, **entry: Any) -> Any:
        super().append(session, **entry)
        if entry["action"] == "version.admit":
            raise Killed


class DyingStaging(StagingArea):
    """A staging area whose process dies just after the commit, when the staged bytes should go."""

    def remove(self, upload_id: str) -> None:
        raise Killed


class DyingObserver:
    """An announcer whose process dies when everything is done."""

    def admitted(self, _upload: Upload) -> None:
        raise Killed

    def refused(self, _upload: Upload) -> None:
        raise Killed

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"only finalize is called here, not {name}")


Fault = Callable[[Services, BlobStore, StagingArea, PrivateKey, FakeClock], dict[str, Any]]

BEFORE_COMMIT: dict[str, Fault] = {
    "before the first blob": lambda s, b, a, k, c: {"blobs": DyingBlobs(b, 0)},
    "between blobs": lambda s, b, a, k, c: {"blobs": DyingBlobs(b, 1)},
    "after the blobs": lambda s, b, a, k, c: {"key": DyingKey(k)},
    "before the commit": lambda s, b, a, k, c: {"services": with_audit(s, DyingAudit(s.db, c))},
}
AFTER_COMMIT: dict[str, Fault] = {
    "before the staged bytes go": lambda s, b, a, k, c: {"staging": DyingStaging(a._root)},
    "before it is announced": lambda s, b, a, k, c: {"observer": DyingObserver()},
}


def with_audit(services: Services, audit: AuditLog) -> Services:
    return Services(
        db=services.db, audit=audit, tenants=services.tenants, tokens=services.tokens, keys=services.keys,
        base_models=services.base_models,
    )  # fmt: skip


@pytest.fixture
def die(
    rebuild: Callable[..., Context], services: Services, blobs: BlobStore, staging: StagingArea,
    admission_key: PrivateKey, clock: FakeClock,
) -> Callable[[Fault, str], None]:  # fmt: skip
    """Finalize an upload of acme in a process that dies with this fault."""

    def run(fault: Fault, upload_id: str) -> None:
        dying = rebuild(**fault(services, blobs, staging, admission_key, clock))
        with pytest.raises(Killed):
            dying.admission.finalize("acme", upload_id, actor="test")

    return run


@pytest.fixture
def restarted(rebuild: Callable[..., Context], seed: Seed) -> Callable[[], World]:
    def start() -> World:
        context = rebuild()
        context.janitor.sweep()
        return World(context, seed)

    return start


@pytest.mark.parametrize("when", BEFORE_COMMIT)
def test_before_the_commit_the_upload_is_open(
    world: World, package: Package, die: Callable[..., None], restarted: Callable[[], World], when: str
) -> None:
    upload_id = world.acme.send(package.signed(world.acme.key), alias="prod")
    die(BEFORE_COMMIT[when], upload_id)
    after = restarted()
    shown = after.acme.show(upload_id)
    assert (shown["state"], shown["version"]) == ("open", None)
    assert all(f["offset"] == f["size"] for f in shown["files"])
    assert after.acme.http.get(after.acme.url("/adapters")).json()["items"] == []
    assert after.acme.resolve("acme/finance:prod")[0]["problem"]["code"] == "NOT_FOUND"
    assert after.context.services.audit.verify("acme").ok
    answer = after.acme.finalize(upload_id)
    assert (answer.status_code, answer.json()["version"]["number"]) == (202, 1)
    assert after.acme.resolve("acme/finance:prod")[0]["version_digest"] == package.digest
    after.close()


@pytest.mark.parametrize("when", AFTER_COMMIT)
def test_after_the_commit_there_is_a_version(
    world: World,
    package: Package,
    die: Callable[..., None],
    restarted: Callable[[], World],
    when: str,
    staging: StagingArea,
) -> None:
    upload_id = world.acme.send(package.signed(world.acme.key), alias="prod")
    die(AFTER_COMMIT[when], upload_id)
    after = restarted()
    assert after.acme.show(upload_id)["state"] == "admitted"
    assert staging.ids() == frozenset(), "what was left is swept at the start"
    assert after.acme.finalize(upload_id).json()["version"]["number"] == 1
    assert after.acme.resolve("acme/finance:prod")[0]["number"] == 1
    name, data = next(iter(package.files.items()))
    assert after.acme.http.get(after.acme.version_url("finance", 1, f"/files/{name}")).content == data
    after.close()


class FullBlobs(DyingBlobs):
    """A store that is full for its first put."""

    def put(self, *arguments: Any) -> None:
        if self._left:
            self._left -= 1
            from adapterd.loader.errors import Code, error

            raise error(Code.STORAGE_FULL, "blobs", "no space left")
        self._inner.put(*arguments)


def test_a_full_store_leaves_the_upload_open(
    rebuild: Callable[..., Context], seed: Seed, blobs: BlobStore, package: Package
) -> None:
    world = World(rebuild(blobs=FullBlobs(blobs, 1)), seed)
    upload_id = world.acme.send(package.signed(world.acme.key))
    answer = world.acme.finalize(upload_id)
    assert (answer.status_code, answer.json()["code"]) == (507, "STORAGE_FULL")
    assert world.acme.show(upload_id)["state"] == "open"
    assert world.acme.finalize(upload_id).json()["state"] == "admitted"
    world.close()
