"""A tenant that floods a real server: the other one's work is done meanwhile, all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from adapterd.registry.api.context import Context
from adapterd.registry.api.lanes import TRANSFERS, WAITING_CHECKS, Lanes
from adapterd.registry.app import build_app
from adapterd.registry.blobs.interfaces import BlobStore
from adapterd.registry.uploads.interfaces import StagingQuota
from fakes.registry_world import Package, Seed, Tenant
from fakes.server import serving_app

FLOOD = 48
"""More than the server has threads for requests (Starlette: 40)."""
SECONDS = 60.0


class HeldBlobs:
    """A store that takes no file of one tenant, and gives none, until it is told to."""

    def __init__(self, inner: BlobStore, tenant: str) -> None:
        self._inner = inner
        self._tenant = tenant
        self.open = threading.Event()

    def put(self, tenant: str, sha256: str, source: Any) -> None:
        self._wait(tenant)
        self._inner.put(tenant, sha256, source)

    def read(self, tenant: str, *rest: Any) -> Iterator[bytes]:
        self._wait(tenant)
        yield from self._inner.read(tenant, *rest)

    def _wait(self, tenant: str) -> None:
        if tenant == self._tenant:
            assert self.open.wait(SECONDS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def held(blobs: BlobStore) -> Iterator[HeldBlobs]:
    made = HeldBlobs(blobs, "acme")
    yield made
    made.open.set()


@contextmanager
def served(context: Context, seed: Seed) -> Iterator[dict[str, Tenant]]:
    """The tenants at a server that listens."""
    with serving_app(build_app(context)) as url:
        clients = {name: _client(url, token) for name, (token, _) in seed.tenants.items()}
        yield {name: Tenant(name, client, seed.tenants[name][1]) for name, client in clients.items()}  # type: ignore[arg-type]
        for client in clients.values():
            client.close()


def _client(url: str, token: str) -> httpx.Client:
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=url, headers=headers, timeout=SECONDS, limits=limits)


def ordinary_work(tenant: Tenant, package: Package) -> None:
    """Of each kind of request one, answered well."""
    version = tenant.publish(package, alias="prod")
    assert tenant.resolve(f"{tenant.name}/finance:prod")[0]["number"] == version["number"]
    assert len(tenant.http.get(tenant.url("/adapters")).json()["items"]) == 1
    name, data = next(iter(package.files.items()))
    assert tenant.http.get(tenant.version_url("finance", version["number"], f"/files/{name}")).content == data
    assert tenant.http.get("/healthz").status_code == 200


def in_line(waiting: Callable[[str], int], count: int) -> None:
    """Until acme's line is that long."""
    pause = threading.Event()
    for _ in range(int(SECONDS / 0.01)):
        if waiting("acme") >= count:
            return
        pause.wait(0.01)
    raise AssertionError(f"{waiting('acme')} wait, not {count}")


def test_checks_of_one_tenant_keep_nobody_waiting(
    rebuild: Callable[..., Context], seed: Seed, held: HeldBlobs, package: Package
) -> None:
    lanes = Lanes(2)
    with served(rebuild(blobs=held, lanes=lanes), seed) as at, ThreadPoolExecutor(FLOOD) as crowd:
        try:
            signed = package.signed(at["acme"].key)
            uploads = [at["acme"].send(signed, f"a{n}") for n in range(FLOOD)]
            flood: list[Future[Any]] = [crowd.submit(at["acme"].finalize, upload) for upload in uploads]
            in_line(lanes._checks.waiting, FLOOD - 1)
            ordinary_work(at["zeta"], package)
            assert not any(one.done() for one in flood), "acme's checks have not moved"
        finally:
            held.open.set()
        assert {one.result().json()["state"] for one in flood} == {"admitted"}


def test_transfers_of_one_tenant_keep_nobody_waiting(
    rebuild: Callable[..., Context], seed: Seed, held: HeldBlobs, package: Package
) -> None:
    lanes, count = Lanes(2), TRANSFERS.each + 20  # of those at work, more than there are threads for disks
    with served(rebuild(blobs=held, lanes=lanes), seed) as at, ThreadPoolExecutor(count) as crowd:
        held.open.set()
        version = at["acme"].publish(package)
        held.open.clear()
        url = at["acme"].version_url("finance", version["number"], f"/files/{next(iter(package.files))}")
        try:
            flood = [crowd.submit(at["acme"].http.get, url) for _ in range(count)]
            in_line(lanes.transfers.waiting, count - TRANSFERS.each)
            ordinary_work(at["zeta"], package)
            assert at["acme"].http.get("/v1/whoami").status_code == 200, "nor is it kept from other work itself"
        finally:
            held.open.set()
        assert {one.result().status_code for one in flood} == {200}


def test_a_tenants_line_is_bounded_and_it_is_told(
    rebuild: Callable[..., Context], seed: Seed, held: HeldBlobs, package: Package
) -> None:
    lanes, count = Lanes(2), WAITING_CHECKS + 1
    quota = StagingQuota(uploads=2 * count)
    with served(rebuild(blobs=held, lanes=lanes, upload_quota=quota), seed) as at, ThreadPoolExecutor(count) as crowd:
        signed = package.signed(at["acme"].key)
        uploads = [at["acme"].send(signed, f"a{n}") for n in range(count + 1)]
        upload = uploads.pop()
        try:
            flood = [crowd.submit(at["acme"].finalize, one) for one in uploads]
            in_line(lanes._checks.waiting, WAITING_CHECKS)
            refused = at["acme"].finalize(upload)
            assert (refused.status_code, refused.json()["code"]) == (503, "QUEUE_FULL")
            assert refused.headers["Retry-After"] == "5"
            assert at["acme"].finalize(uploads[0]).json()["state"] == "processing", "that one is in line already"
        finally:
            held.open.set()
        assert {one.result().json()["state"] for one in flood} == {"admitted"}
