"""Reading the catalog: lists, details, files, aliases, references, and versions out of service."""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from adapterd.loader.trust.keys import PrivateKey
from adapterd.registry.api.lanes import Lanes
from adapterd.registry.api.observe import Observer
from adapterd.registry.app import build_context
from adapterd.registry.blobs.local import LocalBlobs
from adapterd.registry.database import Database
from adapterd.registry.services import build_services
from adapterd.registry.uploads.interfaces import StagingQuota
from adapterd.registry.uploads.staging import StagingArea
from fakes.clock import FakeClock
from fakes.packages import tiny_llama_spec
from fakes.registry_world import CONFIG, TOKEN_SECRET, WEIGHTS, Package, Seed, World


@dataclass(frozen=True)
class Published:
    """A registry with two versions of acme/finance, `prod` on the first: made once, copied for each test."""

    database: Path
    blobs: Path
    seed: Seed
    versions: list[dict[str, Any]]


@pytest.fixture(scope="module")
def published(
    seeded: tuple[Path, Seed],
    package: Package,
    admission_key: PrivateKey,
    tmp_path_factory: pytest.TempPathFactory,
) -> Published:
    home = tmp_path_factory.mktemp("published")
    shutil.copyfile(seeded[0], home / "registry.sqlite3")
    db, clock = Database(f"sqlite:///{home / 'registry.sqlite3'}"), FakeClock()
    context = build_context(
        build_services(db, TOKEN_SECRET, clock), blobs=LocalBlobs(home / "blobs"),
        staging=StagingArea(home / "uploads"), key=admission_key, observer=Observer(io.StringIO()), clock=clock,
        upload_lifetime=timedelta(hours=1),
        upload_quota=StagingQuota(), lanes=Lanes(2),
    )  # fmt: skip
    world = World(context, seeded[1])
    versions = [
        world.acme.publish(package, alias="prod"),
        world.acme.publish(package.changed({"README.md": b"second"})),
    ]
    world.close()
    db.dispose()
    return Published(home / "registry.sqlite3", home / "blobs", seeded[1], versions)


@pytest.fixture
def finance(published: Published) -> list[dict[str, Any]]:
    """The two versions. A test that takes this starts with them."""
    return published.versions


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / "registry.sqlite3"
    if "finance" in request.fixturenames:
        made: Published = request.getfixturevalue("published")
        shutil.copytree(made.blobs, tmp_path / "blobs")
        shutil.copyfile(made.database, path)
    else:
        shutil.copyfile(request.getfixturevalue("seeded")[0], path)
    return f"sqlite:///{path}"


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """Every SELECT that is sent to a database."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT"):
            seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield seen
    event.remove(Engine, "before_cursor_execute", note)


def test_adapters_are_listed(world: World, finance: list[dict[str, Any]], package: Package) -> None:
    world.acme.publish(package, adapter="base-tone")
    body = world.acme.http.get(world.acme.url("/adapters")).json()
    assert [(i["name"], i["versions"]) for i in body["items"]] == [("base-tone", 1), ("finance", 2)]
    assert body["items"][1]["aliases"] == {"prod": finance[0]["version_digest"]}
    assert body["next"] is None
    assert world.acme.http.get(world.acme.url("/adapters/finance")).json() == body["items"][1]


def test_a_version_by_number_and_by_digest(world: World, finance: list[dict[str, Any]]) -> None:
    digest = finance[1]["version_digest"]
    by_number = world.acme.http.get(world.acme.version_url("finance", 2))
    by_digest = world.acme.http.get(world.acme.version_url("finance", f"sha256:{digest}"))
    assert by_number.json() == by_digest.json() == finance[1]
    assert by_number.headers["ETag"] == f'"{digest}"'
    for nothing in ("3", "0", "-1", "x", "1e3", "٣", "sha256:", "sha256:" + "0" * 64, digest, "9" * 30):
        answer = world.acme.http.get(world.acme.version_url("finance", nothing))
        assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND"), nothing


def test_lists_come_in_pages(world: World, package: Package) -> None:
    for name in ("a", "b", "c", "d", "e"):
        world.acme.publish(package, adapter=name)
    url, seen, sizes = world.acme.url("/adapters?limit=2"), [], []
    while True:
        answer = world.acme.http.get(url)
        body = answer.json()
        seen += [i["name"] for i in body["items"]]
        sizes.append(len(body["items"]))
        if body["next"] is None:
            break
        url = answer.links["next"]["url"]
        assert "limit=2" in url
        assert body["next"] in url
    assert (seen, sizes) == (["a", "b", "c", "d", "e"], [2, 2, 1])
    assert "link" not in answer.headers


def test_versions_and_history_come_in_pages(world: World, package: Package) -> None:
    digests = []
    for number in range(3):
        card = {"README.md": str(number).encode()}
        digests.append(world.acme.publish(package.changed(card), alias="prod")["version_digest"])
    for rest, newest_first in (("/versions", False), ("/aliases/prod/history", True)):
        url, seen = world.acme.url(f"/adapters/finance{rest}?limit=2"), []
        first = world.acme.http.get(url).json()
        second = world.acme.http.get(url, params={"limit": 2, "cursor": first["next"]}).json()
        seen = [i["version_digest"] for i in first["items"] + second["items"]]
        assert seen == (digests[::-1] if newest_first else digests)
        assert second["next"] is None


@pytest.mark.parametrize("cursor", ["x", "!!!", "W10", "MQ", "bnVsbA", "eyJhIjoxfQ", "é"])
@pytest.mark.parametrize("rest", ["/adapters", "/adapters/finance/versions", "/tokens"])
def test_a_cursor_of_one_s_own_making(world: World, cursor: str, rest: str) -> None:
    answer = world.acme.http.get(world.acme.url(rest), params={"cursor": cursor})
    assert answer.status_code in (404, 422) if cursor == "MQ" else (answer.status_code == 422), answer.text


def test_files_come_whole_with_their_digest(world: World, finance: list[dict[str, Any]], package: Package) -> None:
    for name, data in package.files.items():
        answer = world.acme.http.get(world.acme.version_url("finance", 1, f"/files/{name}"))
        assert (answer.status_code, answer.content) == (200, data)
        digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
        assert answer.headers["Repr-Digest"] == f"sha-256=:{digest}:"
        assert answer.headers["Content-Length"] == str(len(data))
        assert answer.headers["Content-Type"] == "application/octet-stream"
        assert answer.headers["Accept-Ranges"] == "bytes"
    signature = world.acme.http.get(world.acme.version_url("finance", 1, "/signature"))
    assert hashlib.sha256(signature.content).hexdigest() == finance[0]["signature"]["sha256"]


@pytest.mark.parametrize(
    ("header", "first", "last"),
    [("bytes=0-0", 0, 0), ("bytes=10-19", 10, 19), ("bytes=100-", 100, None), ("bytes=-5", -5, None),
     ("bytes=10-999999999", 10, None), ("bytes=-999999999", 0, None), ("Bytes=1-2", 1, 2)],
)  # fmt: skip
def test_a_range_of_a_file(
    world: World, finance: list[dict[str, Any]], package: Package, header: str, first: int, last: int | None
) -> None:
    data = package.files[WEIGHTS]
    wanted = data[first : None if last is None else last + 1]
    answer = world.acme.http.get(world.acme.version_url("finance", 1, f"/files/{WEIGHTS}"), headers={"Range": header})
    assert (answer.status_code, answer.content) == (206, wanted)
    begin = first if first >= 0 else len(data) + first
    assert answer.headers["Content-Range"] == f"bytes {begin}-{begin + len(wanted) - 1}/{len(data)}"
    digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
    assert answer.headers["Repr-Digest"] == f"sha-256=:{digest}:"


@pytest.mark.parametrize(
    "header", ["bytes=999999999-", "bytes=-0", "bytes=5-4", "bytes=-", "bytes=x-1", "bytes", "bytes=١-2"]
)
def test_a_range_that_is_not_there(world: World, finance: list[dict[str, Any]], package: Package, header: str) -> None:
    answer = world.acme.http.get(
        world.acme.version_url("finance", 1, f"/files/{WEIGHTS}"), headers={"Range": header.encode()}
    )
    assert (answer.status_code, answer.json()["code"]) == (416, "RANGE_INVALID")
    assert answer.headers["Content-Range"] == f"bytes */{len(package.files[WEIGHTS])}"


@pytest.mark.parametrize(
    "headers",
    [{"Range": "lines=1-2"}, {"Range": "bytes=0-1,3-4"}, {"Range": "bytes=0-1", "If-Range": '"another"'}],
)
def test_a_range_that_does_not_count(
    world: World, finance: list[dict[str, Any]], package: Package, headers: dict[str, str]
) -> None:
    answer = world.acme.http.get(world.acme.version_url("finance", 1, f"/files/{CONFIG}"), headers=headers)
    assert (answer.status_code, answer.content) == (200, package.files[CONFIG])


def test_a_lost_blob_is_an_error_and_no_half_answer(
    world: World, finance: list[dict[str, Any]], package: Package
) -> None:
    world.context.blobs.delete("acme", hashlib.sha256(package.files[WEIGHTS]).hexdigest())
    answer = world.acme.http.get(world.acme.version_url("finance", 1, f"/files/{WEIGHTS}"))
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.status_code == 404


class TestAliases:
    def url(self, world: World, alias: str = "prod") -> str:
        return world.acme.url(f"/adapters/finance/aliases/{alias}")

    def test_moving_takes_the_current_digest(
        self, world: World, finance: list[dict[str, Any]], clock: FakeClock
    ) -> None:
        old, new = (v["version_digest"] for v in finance)
        shown = world.acme.http.get(self.url(world))
        assert shown.json() == {"alias": "prod", "number": 1, "version_digest": old}
        assert shown.headers["ETag"] == f'"{old}"'
        clock.advance(minutes=1)
        moved = world.acme.http.put(
            self.url(world), json={"version_digest": new}, headers={"If-Match": shown.headers["ETag"]}
        )
        assert (moved.status_code, moved.json()["number"], moved.headers["ETag"]) == (200, 2, f'"{new}"')
        stale = world.acme.http.put(self.url(world), json={"version_digest": old}, headers={"If-Match": f'"{old}"'})
        assert (stale.status_code, stale.json()["code"]) == (412, "PRECONDITION_FAILED")
        assert stale.headers["ETag"] == f'"{new}"'
        history = world.acme.http.get(self.url(world) + "/history").json()["items"]
        assert [(m["number"], m["version_digest"]) for m in history] == [(2, new), (1, old)]
        assert history[0]["moved_at"] == clock.now.isoformat()
        assert history[0]["by"] == world.acme.http.headers["Authorization"][len("Bearer adru_") :][:10]

    def test_making_one(self, world: World, finance: list[dict[str, Any]]) -> None:
        body = {"version_digest": "sha256:" + finance[1]["version_digest"]}
        made = world.acme.http.put(self.url(world, "canary"), json=body, headers={"If-None-Match": "*"})
        assert made.status_code == 201
        again = world.acme.http.put(self.url(world, "canary"), json=body, headers={"If-None-Match": "*"})
        assert (again.status_code, again.json()["code"]) == (412, "PRECONDITION_FAILED")

    @pytest.mark.parametrize(
        ("headers", "expected"),
        [
            ({}, (428, "PRECONDITION_REQUIRED")),
            ({"If-Match": "*"}, (422, "REQUEST_INVALID")),
            ({"If-Match": 'W/"x"'}, (422, "REQUEST_INVALID")),
            ({"If-Match": '"a", "b"'}, (422, "REQUEST_INVALID")),
            ({"If-None-Match": '"a"'}, (422, "REQUEST_INVALID")),
            ({"If-Match": '"a"', "If-None-Match": "*"}, (422, "REQUEST_INVALID")),
        ],
    )
    def test_without_a_good_precondition(
        self, world: World, finance: list[dict[str, Any]], headers: dict[str, str], expected: Any
    ) -> None:
        body = {"version_digest": finance[1]["version_digest"]}
        answer = world.acme.http.put(self.url(world), json=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == expected

    def test_to_nothing(self, world: World, finance: list[dict[str, Any]]) -> None:
        answer = world.acme.http.put(
            self.url(world, "canary"), json={"version_digest": "0" * 64}, headers={"If-None-Match": "*"}
        )
        assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")
        assert world.acme.http.get(self.url(world, "canary")).status_code == 404
        assert world.acme.http.get(self.url(world, "canary") + "/history").status_code == 404


class TestResolve:
    def test_all_forms(self, world: World, finance: list[dict[str, Any]]) -> None:
        one, two = (v["version_digest"] for v in finance)
        refs = [
            "acme/finance:prod", f"acme/finance@sha256:{two}", f"acme/finance:prod@sha256:{one}",
            f"acme/finance:prod@sha256:{two}", "acme/finance", "acme/nothing:prod", f"acme/finance@sha256:{'0' * 64}",
            "not a ref", "acme/finance:prod",
        ]  # fmt: skip
        items = world.acme.resolve(*refs)
        assert [i["ref"] for i in items] == refs
        got = [i.get("version_digest") or i["problem"]["code"] for i in items]
        assert got == [
            one,
            two,
            one,
            "REF_CONFLICT",
            "NOT_FOUND",
            "NOT_FOUND",
            "NOT_FOUND",
            "REF_INVALID",
            one,
        ]
        assert items[0]["base"] == world.base.pin.as_json()
        assert (items[0]["tenant"], items[0]["adapter"], items[0]["number"]) == ("acme", "finance", 1)
        assert items[0]["state"] == "active"

    def test_the_default_alias(self, world: World, package: Package) -> None:
        world.acme.publish(package, alias="default")
        (item,) = world.acme.resolve("acme/finance")
        assert item["version_digest"] == package.digest

    def test_a_fixed_number_of_statements(
        self, world: World, finance: list[dict[str, Any]], statements: list[str]
    ) -> None:
        digest = finance[1]["version_digest"]
        counts = []
        for refs in (
            ["acme/finance:prod"],
            ["acme/finance:prod", f"acme/finance@sha256:{digest}", "x/y"] * 100,
        ):
            statements.clear()
            assert len(world.acme.resolve(*refs)) == len(refs)
            counts.append(len(statements))
        assert counts[0] == counts[1] <= 3, "the token, the aliases, the digests"

    def test_too_many(self, world: World) -> None:
        answer = world.acme.http.post("/v1/resolve", json={"refs": ["acme/x"] * 1001})
        assert (answer.status_code, answer.json()["code"]) == (422, "REQUEST_INVALID")


class TestWithdrawn:
    def move(self, world: World, verb: str, version: str | int = 1) -> Any:
        return world.acme.http.post(world.acme.version_url("finance", f"{version}:{verb}"))

    def outcomes(self, world: World, digest: str) -> list[str]:
        refs = ["acme/finance:prod", f"acme/finance@sha256:{digest}", f"acme/finance:prod@sha256:{digest}"]
        return [i.get("state") or i["problem"]["code"] for i in world.acme.resolve(*refs)]

    def test_yank_quarantine_release(self, world: World, finance: list[dict[str, Any]]) -> None:
        digest = finance[0]["version_digest"]
        assert self.outcomes(world, digest) == ["active"] * 3
        assert self.move(world, "yank").json()["state"] == "yanked"
        assert self.outcomes(world, digest) == ["VERSION_WITHDRAWN", "yanked", "yanked"]
        assert self.move(world, "quarantine", f"sha256:{digest}").json()["state"] == "quarantined"
        assert self.outcomes(world, digest) == ["VERSION_WITHDRAWN"] * 3
        assert self.move(world, "release").json()["state"] == "active"
        assert self.outcomes(world, digest) == ["active"] * 3
        actions = [e.action for e in world.context.services.audit.list("acme")][-3:]
        assert actions == ["version.yanked", "version.quarantined", "version.active"]
        assert world.context.services.audit.verify("acme").ok

    def test_twice_is_once(self, world: World, finance: list[dict[str, Any]]) -> None:
        self.move(world, "yank")
        before = len(world.context.services.audit.list("acme"))
        assert self.move(world, "yank").json()["state"] == "yanked"
        assert len(world.context.services.audit.list("acme")) == before

    def test_no_alias_to_it(self, world: World, finance: list[dict[str, Any]], package: Package) -> None:
        self.move(world, "quarantine", 2)
        url = world.acme.url("/adapters/finance/aliases/canary")
        body = {"version_digest": finance[1]["version_digest"]}
        answer = world.acme.http.put(url, json=body, headers={"If-None-Match": "*"})
        assert (answer.status_code, answer.json()["code"]) == (409, "VERSION_WITHDRAWN")
        # Nor by uploading it again.
        again = package.changed({"README.md": b"second"}).signed(world.acme.key)
        upload_id = world.acme.send(again, alias="canary")
        answer = world.acme.finalize(upload_id)
        assert (answer.status_code, answer.json()["code"]) == (409, "VERSION_WITHDRAWN")
        assert world.acme.http.get(url).status_code == 404
        self.move(world, "release", 2)
        assert world.acme.finalize(upload_id).json()["version"]["number"] == 2
        assert world.acme.http.get(url).json()["number"] == 2

    def test_of_nothing(self, world: World, finance: list[dict[str, Any]]) -> None:
        for verb in ("yank", "quarantine", "release"):
            assert self.move(world, verb, 9).json()["code"] == "NOT_FOUND"


def test_a_digest_names_one_version_of_an_adapter(world: World, package: Package) -> None:
    """The same files for another base would make `name@digest` mean two things."""
    silent = package.changed(
        {CONFIG: package.files[CONFIG].replace(b'"revision": "' + b"7" * 40 + b'"', b'"revision": null')}
    )
    world.acme.publish(silent)
    other = tiny_llama_spec(revision="8" * 40)
    world.context.services.base_models.add(other, actor="test")
    moved = replace(silent, base=other)
    answer = world.acme.http.post(world.acme.url("/uploads"), json=moved.signed(world.acme.key).declaration("finance"))
    assert (answer.status_code, answer.json()["code"]) == (409, "ALREADY_EXISTS")
    assert world.acme.publish(moved, adapter="elsewhere")["base"] == other.pin.as_json()
