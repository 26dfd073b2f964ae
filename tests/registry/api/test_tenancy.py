"""A foreign object and a missing one answer alike: status, body and headers (I9)."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.registry_world import ALL_SCOPES, CONFIG, Package, World

# Of an upload, a version, an alias, a key and a token that acme has; `{…}` is filled with acme's names or with
# names that nobody has.
ROUTES = [
    ("GET", "/policy", None),
    ("PUT", "/policy", {}),
    ("GET", "/tokens", None),
    ("POST", "/tokens", {"kind": "u", "scopes": ["adapters:read"], "expires_in_days": 1}),
    ("DELETE", "/tokens/{token}", None),
    ("GET", "/keys", None),
    ("POST", "/keys", {"name": "x", "public_key_pem": "x"}),
    ("POST", "/keys/{key}:revoke", None),
    ("POST", "/uploads", "declaration"),
    ("GET", "/uploads/{upload}", None),
    ("PATCH", "/uploads/{upload}/files/adapter_config.json", b"x"),
    ("POST", "/uploads/{upload}:finalize", None),
    ("DELETE", "/uploads/{upload}", None),
    ("GET", "/adapters", None),
    ("GET", "/adapters/{adapter}", None),
    ("GET", "/adapters/{adapter}/versions", None),
    ("GET", "/adapters/{adapter}/versions/1", None),
    ("GET", "/adapters/{adapter}/versions/sha256:{digest}", None),
    ("GET", "/adapters/{adapter}/versions/1/files/adapter_config.json", None),
    ("GET", "/adapters/{adapter}/versions/1/signature", None),
    ("GET", "/adapters/{adapter}/versions/1/admission", None),
    ("POST", "/adapters/{adapter}/versions/1:yank", None),
    ("POST", "/adapters/{adapter}/versions/1:quarantine", None),
    ("POST", "/adapters/{adapter}/versions/1:release", None),
    ("GET", "/adapters/{adapter}/aliases/{alias}", None),
    ("PUT", "/adapters/{adapter}/aliases/{alias}", {"version_digest": "0" * 64}),
    ("GET", "/adapters/{adapter}/aliases/{alias}/history", None),
]


@pytest.fixture
def names(world: World, package: Package) -> dict[str, str]:
    """What acme has."""
    version = world.acme.publish(package, alias="prod")
    return {
        "adapter": "finance",
        "alias": "prod",
        "digest": version["version_digest"],
        "upload": world.acme.open(package, adapter="second")["id"],
        "key": world.acme.key.public.key_id,
        "token": world.acme.http.headers["Authorization"][len("Bearer adru_") :][:10],
    }


MISSING = {
    "adapter": "nothing", "alias": "nowhere", "digest": "0" * 64, "upload": "0" * 32, "key": "0" * 64,
    "token": "0" * 10,
}  # fmt: skip


def ask(client: Any, tenant: str, method: str, rest: str, body: Any) -> Any:
    kind = {"content": body, "headers": {"Upload-Offset": "0"}} if isinstance(body, bytes) else {"json": body}
    if body is None:
        kind = {}
    if rest.endswith("}") and method == "PUT":
        kind["headers"] = {"If-None-Match": "*"}
    return client.request(method, f"/v1/tenants/{tenant}{rest}", **kind)


def seen(answer: Any) -> Any:
    """The whole answer, the request's own path taken out."""
    text = answer.text.replace(answer.request.url.path, "PATH")
    headers = {k: v for k, v in answer.headers.items() if k != "content-length"}
    return answer.status_code, text, headers


def test_every_route_of_a_tenant(world: World, package: Package, names: dict[str, str]) -> None:
    """zeta asks for what acme has, for what acme has not, and for a tenant that is not there."""
    for method, rest, given in ROUTES:
        body = package.declaration("finance") if given == "declaration" else given
        foreign = ask(world.zeta.http, "acme", method, rest.format(**names), body)
        missing = ask(world.zeta.http, "acme", method, rest.format(**MISSING), body)
        nobody = ask(world.zeta.http, "no-such-tenant", method, rest.format(**names), body)
        assert foreign.status_code == 404, (method, rest, foreign.text)
        assert foreign.json()["code"] == "NOT_FOUND"
        assert seen(foreign) == seen(missing) == seen(nobody), (method, rest)


def test_a_foreign_object_and_one_s_own_missing_one(world: World, names: dict[str, str]) -> None:
    for method, rest, body in ROUTES:
        if "{" not in rest or body is not None:
            continue
        foreign = ask(world.zeta.http, "acme", method, rest.format(**names), body)
        missing = ask(world.zeta.http, "zeta", method, rest.format(**MISSING), body)
        assert seen(foreign) == seen(missing), (method, rest)


def test_nothing_was_touched(world: World, package: Package, names: dict[str, str]) -> None:
    before = len(world.context.services.audit.list("acme", limit=1000))
    test_every_route_of_a_tenant(world, package, names)
    assert len(world.context.services.audit.list("acme", limit=1000)) == before
    assert world.acme.show(names["upload"])["state"] == "open"
    assert world.acme.show(names["upload"])["files"][0]["offset"] == 0


def test_the_table_has_every_route(world: World) -> None:
    paths = world.operator.get("/openapi.json").json()["paths"]
    known = {
        (method.upper(), path.removeprefix("/v1/tenants/{tenant}"))
        for path, methods in paths.items() if path.startswith("/v1/tenants/{tenant}")
        for method in methods
    }  # fmt: skip
    shapes = {(m, r.split("{")[0].split("/1")[0].split("/sha256")[0]) for m, r, _ in ROUTES}
    for method, rest in known:
        assert any(m == method and rest.startswith(shape) for m, shape in shapes), (method, rest)
    assert len(known) == len(ROUTES) - 1, "one more: a version by its digest"


def test_references(world: World, names: dict[str, str]) -> None:
    refs = [
        "acme/finance:prod",
        f"acme/finance@sha256:{names['digest']}",
        "acme/nothing:prod",
        "no-tenant/finance:prod",
    ]
    items = world.zeta.resolve(*refs)
    assert {str({**i["problem"], "where": ""}) for i in items} == {str({**items[0]["problem"], "where": ""})}
    assert items[0]["problem"]["code"] == "NOT_FOUND"
    assert [i["problem"]["where"] for i in items] == refs, "only what was asked comes back"


def test_equal_bytes_of_two_tenants_are_stored_twice(world: World, package: Package) -> None:
    """Who knows a digest learns nothing from how long an upload takes, or from whether it can be read."""
    world.acme.publish(package)
    digest = next(f.sha256 for f in package.entries if f.path == CONFIG)
    assert world.context.blobs.size("acme", digest) is not None
    assert world.context.blobs.size("zeta", digest) is None
    world.zeta.publish(package)
    world.context.blobs.delete("acme", digest)
    assert world.zeta.http.get(world.zeta.version_url("finance", 1, f"/files/{CONFIG}")).status_code == 200


@pytest.mark.parametrize("scope", ALL_SCOPES)
def test_a_scope_opens_its_own_routes_only(world: World, package: Package, names: dict[str, str], scope: str) -> None:
    """Which routes of its own tenant a token with one scope gets past the door of."""
    client = world.client(world.token("acme", scope))
    wanted = {
        "adapters:read": lambda m, r: m == "GET" and r.startswith("/adapters"),
        "adapters:upload": lambda m, r: r.startswith("/uploads"),
        "aliases:promote": lambda m, r: m != "GET" and r.startswith("/adapters"),
        "keys:admin": lambda m, r: r.startswith(("/keys", "/policy")),
        "tokens:admin": lambda m, r: r.startswith("/tokens"),
        "audit:read": lambda m, r: False,
    }[scope]
    for method, rest, given in ROUTES:
        if method == "DELETE":
            continue
        body = package.declaration("finance") if given == "declaration" else given
        answer = ask(client, "acme", method, rest.format(**names), body)
        shut = answer.status_code == 404 and answer.json()["code"] == "NOT_FOUND"
        if rest.endswith("{alias}") and method == "PUT":
            shut = answer.status_code == 404 and not wanted(method, rest)  # the digest is nobody's
        assert shut != wanted(method, rest), (scope, method, rest, answer.text)


def test_a_token_for_some_adapters(world: World, package: Package, names: dict[str, str]) -> None:
    world.acme.publish(package, adapter="team-a.tone", alias="prod")
    client = world.client(world.token("acme", *ALL_SCOPES, adapters=("team-a.*",)))
    url = world.acme.url("/adapters")
    assert [i["name"] for i in client.get(url).json()["items"]] == ["team-a.tone"]
    assert client.get(url + "/team-a.tone").status_code == 200
    assert client.get(url + "/finance").status_code == 404
    assert client.get(world.acme.url(f"/uploads/{names['upload']}")).status_code == 404
    body = package.declaration("finance")
    assert client.post(world.acme.url("/uploads"), json=body).status_code == 404
    refs = {"refs": ["acme/finance:prod", "acme/team-a.tone:prod"]}
    items = client.post("/v1/resolve", json=refs).json()["items"]
    assert ["problem" in i for i in items] == [True, False]


def test_an_upload_that_moves_an_alias_takes_that_right(world: World, package: Package) -> None:
    uploader = world.client(world.token("acme", "adapters:upload"))
    url = world.acme.url("/uploads")
    assert uploader.post(url, json=package.declaration("finance", alias="prod")).status_code == 404
    assert uploader.post(url, json=package.declaration("finance")).status_code == 201
    upload_id = world.acme.send(package.signed(world.acme.key), alias="prod")
    assert uploader.post(f"{url}/{upload_id}:finalize").status_code == 404
    assert world.acme.finalize(upload_id).status_code == 202


def test_an_operator_reads_no_adapters(world: World, names: dict[str, str]) -> None:
    for rest in ("/adapters", "/adapters/finance", f"/uploads/{names['upload']}"):
        assert world.operator.get(world.acme.url(rest)).status_code == 404
