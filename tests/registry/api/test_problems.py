"""Everything that is not a success is a problem document, and none of them tells too much."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from adapterd.registry.api.context import Context
from adapterd.registry.api.observe import Observe, Observer
from adapterd.registry.blobs.interfaces import BlobStore
from fakes.registry_world import CONFIG, Package, Seed, World

FIELDS = {"type", "title", "status", "detail", "instance", "code", "where", "hint", "problems"}


def problem(answer: Any, status: int, code: str) -> dict[str, Any]:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    body = answer.json()
    assert set(body) == FIELDS
    assert (body["status"], body["code"]) == (status, code)
    assert body["type"] == "/problems/" + code.lower().replace("_", "-")
    assert body["instance"] == answer.request.url.path
    assert body["problems"][0]["code"] == code
    return body


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "/v1/nothing", "/v1/tenants/acme/", "/docs", "/v2/tenants"])
def test_unknown_addresses(world: World, path: str) -> None:
    problem(world.acme.http.get(path), 404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", "/v1/tenants", "GET, POST"),
        ("POST", "/healthz", "GET"),
        ("DELETE", "/v1/tenants/acme/policy", "GET, PUT"),
        ("PUT", "/v1/tenants/acme/uploads/1", "DELETE, GET"),
        ("DELETE", "/v1/tenants/acme/adapters/a/aliases/b", "GET, PUT"),
        ("GET", "/v1/tenants/acme/uploads", "POST"),
        ("GET", "/v1/resolve", "POST"),
        ("PUT", "/v1/tenants/acme/adapters/a/versions/1", "GET"),
    ],
)
def test_unknown_methods(world: World, method: str, path: str, allow: str) -> None:
    answer = world.acme.http.request(method, path)
    problem(answer, 405, "METHOD_NOT_ALLOWED")
    assert answer.headers["Allow"] == allow


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"{", "application/json"), (b"[]", "application/json"), (b"{}", "application/json"),
     (b'{"name": "x"}', "text/plain"), (b'{"name": 7}', "application/json"), (b"\xff", "application/json"),
     (b'{"name": "x", "more": 1}', "application/json"),
     (b"", "application/json"), (b"[" * 200_000, "application/json")],
)  # fmt: skip
def test_bodies_that_are_not_wanted(world: World, content: bytes, kind: str) -> None:
    answer = world.operator.post("/v1/tenants", content=content, headers={"Content-Type": kind})
    problem(answer, 422, "REQUEST_INVALID")


def test_a_refused_value_is_not_repeated(world: World) -> None:
    answer = world.operator.post("/v1/tenants", json={"name": "x", "password": "hunter2"})
    assert "hunter2" not in answer.text


def test_bodies_are_bounded(world: World) -> None:
    big = b'{"name": "' + b"x" * (2 << 20) + b'"}'
    headers = {"Content-Type": "application/json"}
    problem(world.operator.post("/v1/tenants", content=big, headers=headers), 422, "QUOTA_EXCEEDED")

    def pieces() -> Iterator[bytes]:  # no Content-Length
        yield from (big[i : i + 65536] for i in range(0, len(big), 65536))

    problem(world.operator.post("/v1/tenants", content=pieces(), headers=headers), 422, "QUOTA_EXCEEDED")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer x", "Basic YTpi", "Bearer adru_" + "a" * 59])
def test_without_a_token(world: World, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    client = world.client(None)
    for method, path in [
        ("GET", "/v1/whoami"),
        ("POST", "/v1/resolve"),
        ("GET", "/v1/nothing"),
        ("PUT", "/v1/tenants"),
    ]:
        answer = client.request(method, path, headers=headers)
        problem(answer, 401, "UNAUTHENTICATED")
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_no_body_is_read_before_the_token(world: World) -> None:
    """A body that never ends is no reason to wait: the answer is there without it."""

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was asked for")

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/resolve", "raw_path": b"/v1/resolve", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "server": ("test", 80),
    }  # fmt: skip
    asyncio.run(world.app(scope, receive, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 401


def test_an_expired_token(world: World, clock: Any) -> None:
    client = world.client(world.token("acme", "adapters:read"))
    clock.advance(days=1)
    problem(client.get("/v1/whoami"), 401, "TOKEN_EXPIRED")


class BuggyBlobs:
    """A store with a bug in it."""

    def __init__(self, inner: BlobStore) -> None:
        self._inner = inner

    def read(self, *_: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_bug_is_told_without_its_details(
    rebuild: Callable[..., Context], seed: Seed, blobs: BlobStore, package: Package, log: io.StringIO
) -> None:
    world = World(rebuild(blobs=BuggyBlobs(blobs)), seed)
    world.acme.publish(package)
    answer = world.acme.http.get(world.acme.version_url("finance", 1, f"/files/{CONFIG}"))
    body = problem(answer, 500, "INTERNAL")
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert body["detail"]
    assert '"status": 500' in log.getvalue()
    world.close()


def test_a_database_that_is_away(
    rebuild: Callable[..., Context], world: World, database_url: str, tmp_path: Any, log: io.StringIO
) -> None:
    world.context.services.db.dispose()
    (tmp_path / "registry.sqlite3").rename(tmp_path / "away")
    (tmp_path / "registry.sqlite3").mkdir()
    answer = world.acme.http.get("/v1/whoami")
    problem(answer, 503, "DATABASE_UNAVAILABLE")
    assert answer.headers["Retry-After"]
    assert str(tmp_path) not in answer.text, "where the server keeps its things is not the caller's business"
    assert str(tmp_path) in log.getvalue(), "but its operator's"
    problem(world.client(None).get("/readyz"), 503, "DATABASE_UNAVAILABLE")
    assert world.client(None).get("/healthz").status_code == 200


def test_what_a_disk_says_is_told_to_the_operator_alone(
    rebuild: Callable[..., Context], seed: Seed, package: Package, tmp_path: Any, log: io.StringIO
) -> None:
    (tmp_path / "blobs").touch()  # where a folder is to be
    world = World(rebuild(), seed)
    upload_id = world.acme.send(package.signed(world.acme.key))
    for answer in (world.acme.finalize(upload_id), world.acme.http.get("/readyz")):
        problem(answer, 503, "STORAGE_UNAVAILABLE")
        assert str(tmp_path) not in answer.text
    assert log.getvalue().count(str(tmp_path / "blobs")) >= 2
    (tmp_path / "blobs").unlink()
    assert world.acme.finalize(upload_id).json()["state"] == "admitted"
    world.close()


def test_a_server_that_can_take_no_uploads_is_not_ready(world: World, tmp_path: Any) -> None:
    assert world.acme.http.get("/readyz").json() == {"status": "ready"}
    (tmp_path / "uploads").rmdir()
    (tmp_path / "uploads").touch()
    problem(world.acme.http.get("/readyz"), 503, "STORAGE_UNAVAILABLE")


def test_a_request_that_a_stopping_server_cuts_off_is_told_so() -> None:
    """Whoever sent it may send it again, and so does a worker by itself."""
    sent: list[dict[str, Any]] = []
    heard = io.StringIO()

    async def slow(_scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def serve() -> None:
        scope = {"type": "http", "method": "GET", "path": "/v1/whoami", "headers": []}
        task = asyncio.create_task(Observe(slow, Observer(heard))(scope, None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(serve())
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"5") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["code"] == "SERVER_UNREACHABLE"
    assert json.loads(heard.getvalue())["status"] == 503
