"""The main walk on the other database and the other store: what is tested at length on SQLite holds there, too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from fakes.registry_world import WEIGHTS, Package, World


@pytest.mark.parametrize(("kind", "store"), [("postgres", "s3"), ("postgres", "local"), ("sqlite", "s3")])
def test_publish_resolve_download_withdraw(world: World, package: Package) -> None:
    first = world.acme.publish(package, alias="prod")
    second = world.acme.publish(package.changed({"README.md": b"second"}))
    assert (first["number"], second["number"]) == (1, 2)
    (item,) = world.acme.resolve("acme/finance:prod")
    assert item["version_digest"] == package.digest
    url = world.acme.version_url("finance", f"sha256:{package.digest}", f"/files/{WEIGHTS}")
    data = package.files[WEIGHTS]
    assert world.acme.http.get(url).content == data
    part = world.acme.http.get(url, headers={"Range": "bytes=100-199"})
    assert (part.status_code, part.content) == (206, data[100:200])
    moved = world.acme.http.put(
        world.acme.url("/adapters/finance/aliases/prod"),
        json={"version_digest": second["version_digest"]}, headers={"If-Match": f'"{package.digest}"'},
    )  # fmt: skip
    assert moved.status_code == 200
    assert world.acme.http.post(world.acme.version_url("finance", "2:quarantine")).json()["state"] == "quarantined"
    assert world.acme.resolve("acme/finance:prod")[0]["problem"]["code"] == "VERSION_WITHDRAWN"
    assert world.zeta.resolve(f"acme/finance@sha256:{package.digest}")[0]["problem"]["code"] == "NOT_FOUND"
    page = world.acme.http.get(world.acme.url("/adapters/finance/versions?limit=1"))
    rest = world.acme.http.get(page.links["next"]["url"])
    assert [v["number"] for v in page.json()["items"] + rest.json()["items"]] == [1, 2]
    assert world.acme.http.get("/readyz").json() == {"status": "ready"}
    assert world.context.services.audit.verify("acme").ok


@pytest.mark.parametrize("kind", ["postgres"])
def test_races_on_row_locks(world: World, package: Package) -> None:
    """SQLite's writers queue by themselves; here it is the tenant's row that orders them."""
    cards = [package.changed({"README.md": str(n).encode()}).signed(world.acme.key) for n in range(3)]
    uploads = [world.acme.send(card) for card in cards]
    finalize = [partial(world.acme.finalize, upload_id) for upload_id in uploads * 2]
    with ThreadPoolExecutor(len(finalize)) as pool:
        answers = [future.result() for future in [pool.submit(call) for call in finalize]]
    assert {a.status_code for a in answers} == {202}
    numbers = [world.acme.show(upload_id)["version"]["number"] for upload_id in uploads]
    assert sorted(numbers) == [1, 2, 3]
    assert world.context.services.audit.verify("acme").ok


@pytest.mark.parametrize("kind", ["postgres"])
def test_one_key_at_once_opens_one_session(world: World, package: Package) -> None:
    def create() -> str:
        answer = world.acme.http.post(
            world.acme.url("/uploads"),
            json=package.declaration("finance"),
            headers={"Idempotency-Key": "once"},
        )
        return str(answer.json()["id"])

    with ThreadPoolExecutor(4) as pool:
        assert len({f.result() for f in [pool.submit(create) for _ in range(4)]}) == 1
