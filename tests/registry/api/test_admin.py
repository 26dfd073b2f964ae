"""Tenants, tokens, keys, policies, base models; who am I; what operators see."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.trust.keys import generate_admission_key, generate_publisher_key
from fakes.packages import tiny_llama_spec
from fakes.registry_world import ALL_SCOPES, Package, World


def code(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def test_tenants(world: World) -> None:
    made = world.operator.post("/v1/tenants", json={"name": "new-one"})
    assert (made.status_code, made.json()["name"]) == (201, "new-one")
    names = [t["name"] for t in world.operator.get("/v1/tenants").json()["items"]]
    assert names == ["acme", "new-one", "zeta"]
    first = world.operator.get("/v1/tenants", params={"limit": 2})
    second = world.operator.get(first.links["next"]["url"])
    assert [t["name"] for t in first.json()["items"] + second.json()["items"]] == names
    assert code(world.operator.post("/v1/tenants", json={"name": "acme"})) == (409, "ALREADY_EXISTS")
    assert code(world.operator.post("/v1/tenants", json={"name": "A b"})) == (400, "REF_INVALID")
    for client in (world.acme.http, world.client(world.token("acme", *ALL_SCOPES))):
        assert code(client.post("/v1/tenants", json={"name": "mine"})) == (404, "NOT_FOUND")
        assert code(client.get("/v1/tenants")) == (404, "NOT_FOUND")


def test_tokens(world: World) -> None:
    url = world.acme.url("/tokens")
    wanted = {"kind": "w", "scopes": ["adapters:read"], "expires_in_days": 7, "adapters": ["fin*"]}
    made = world.operator.post(url, json=wanted)
    assert made.status_code == 201
    assert made.headers["Cache-Control"] == "no-store"
    token = made.json()["token"]
    assert token.startswith("adrw_")
    me = world.client(token).get("/v1/whoami").json()
    assert (me["tenant"], me["kind"], me["scopes"]) == ("acme", "w", ["adapters:read"])
    assert me["expires_at"] == made.json()["expires_at"]
    listed = world.acme.http.get(url)
    assert made.json()["id"] in {t["id"] for t in listed.json()["items"]}
    assert token not in listed.text
    assert world.acme.http.delete(f"{url}/{made.json()['id']}").status_code == 204
    assert code(world.client(token).get("/v1/whoami")) == (401, "UNAUTHENTICATED")
    assert code(world.acme.http.delete(f"{url}/nosuchtokn")) == (404, "NOT_FOUND")
    assert code(world.operator.post("/v1/tenants/nobody/tokens", json=wanted)) == (404, "NOT_FOUND")
    for over in (
        {"scopes": ["operator"]},
        {"scopes": ["all"]},
        {"expires_in_days": 0},
        {"kind": "x"},
        {"adapters": ["[a]"]},
    ):
        assert code(world.acme.http.post(url, json={**wanted, **over})) == (422, "REQUEST_INVALID"), over


def test_the_operator_s_own_token(world: World) -> None:
    me = world.operator.get("/v1/whoami").json()
    assert (me["tenant"], me["scopes"]) == (None, ["operator"])


def test_keys(world: World) -> None:
    url, key = world.acme.url("/keys"), generate_publisher_key()
    made = world.acme.http.post(url, json={"name": "ci", "public_key_pem": key.public.pem})
    assert (made.status_code, made.json()["key_id"], made.json()["status"]) == (
        201,
        key.public.key_id,
        "active",
    )
    assert {k["name"] for k in world.acme.http.get(url).json()["items"]} == {"release", "ci"}
    assert world.acme.http.post(f"{url}/{key.public.key_id}:revoke").json()["status"] == "revoked"
    body = {"name": "ci2", "public_key_pem": key.public.pem}
    assert code(world.acme.http.post(url, json=body)) == (409, "ALREADY_EXISTS")
    wrong = {"name": "ed", "public_key_pem": generate_admission_key().public.pem}
    assert code(world.acme.http.post(url, json=wrong)) == (422, "KEY_UNSUPPORTED")
    assert code(world.operator.get("/v1/tenants/nobody/keys")) == (404, "NOT_FOUND")


def test_policies(world: World) -> None:
    url = world.acme.url("/policy")
    policy = world.acme.http.get(url).json()
    assert (policy["require_signature"], policy["allow"]) == (True, [])
    set_to = world.operator.put(
        url, json={"require_signature": False, "allow": ["ZERO_DELTA"], "limits": {"max_rank": 8}}
    )
    assert set_to.json() == world.acme.http.get(url).json()
    assert set_to.json()["limits"]["max_rank"] == 8
    for bad in ({"limits": {"max_rank": 0}}, {"limits": {"max_ranks": 1}}, {"allow": ["SIGNATURE_INVALID"]}):
        assert code(world.acme.http.put(url, json=bad)) == (400, "SETTINGS_INVALID"), bad
    assert code(world.operator.get("/v1/tenants/nobody/policy")) == (404, "NOT_FOUND")


def test_base_models(world: World) -> None:
    spec = tiny_llama_spec(revision="8" * 40)
    assert code(world.acme.http.post("/v1/base-models", json=spec.as_json())) == (404, "NOT_FOUND")
    made = world.operator.post("/v1/base-models", json=spec.as_json())
    assert (made.status_code, made.json()["module_table_digest"]) == (201, spec.table_digest)
    assert world.operator.post("/v1/base-models", json=spec.as_json()).status_code == 201
    other = tiny_llama_spec(revision="8" * 40, layers=3)
    assert code(world.operator.post("/v1/base-models", json=other.as_json())) == (409, "ALREADY_EXISTS")
    assert code(world.operator.post("/v1/base-models", json={"schema": "x"})) == (400, "BASE_TABLE_INVALID")
    first = world.acme.http.get("/v1/base-models", params={"limit": 1})
    second = world.acme.http.get(first.links["next"]["url"])
    items = first.json()["items"] + second.json()["items"]
    assert [i["revision"] for i in items] == ["7" * 40, "8" * 40]
    assert items[1]["modules"] == len(spec.modules)
    wanted = {"id": spec.id, "revision": spec.revision}
    assert BaseSpec.from_json(world.acme.http.get("/v1/base-models/table", params=wanted).json()) == spec
    missing = world.acme.http.get("/v1/base-models/table", params={**wanted, "revision": "9" * 40})
    assert code(missing) == (404, "BASE_NOT_REGISTERED")
    assert code(world.acme.http.get("/v1/base-models/table")) == (422, "REQUEST_INVALID")


def test_health(world: World) -> None:
    client = world.client(None)
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}


def test_metrics(world: World, package: Package) -> None:
    world.acme.publish(package)
    world.acme.http.get("/v1/nothing")
    text = world.client(None).get("/metrics").text
    assert 'adapterd_uploads_total{outcome="admitted"} 1.0' in text
    route = "/v1/tenants/{tenant}/uploads/{upload_id}:finalize"
    assert f'adapterd_requests_total{{method="POST",route="{route}",status="202"}} 1.0' in text
    assert 'adapterd_requests_total{method="GET",route="unmatched",status="404"} 1.0' in text
    sent = sum(len(d) for d in package.signed(world.acme.key).files.values())
    received = next(line for line in text.splitlines() if line.startswith("adapterd_received_bytes_total"))
    assert float(received.split()[1]) == pytest.approx(sent, abs=8)  # the length of an ECDSA signature varies
    assert "acme" not in text, "tenants are not labels"


def test_the_log_tells_all_but_secrets(world: World, package: Package, log: io.StringIO) -> None:
    made = world.acme.http.post(
        world.acme.url("/tokens"), json={"kind": "u", "scopes": ["adapters:read"], "expires_in_days": 1}
    ).json()
    world.acme.publish(package)
    world.client("adru_nonsense").get("/v1/whoami")
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert {"request", "upload.received", "upload.admitted"} <= {line["event"] for line in lines}
    finalized = next(line for line in lines if line["event"] == "request" and line["path"].endswith(":finalize"))
    assert (finalized["status"], finalized["method"], finalized["code"]) == (202, "POST", None)
    assert finalized["token"] == world.acme.http.headers["Authorization"][len("Bearer adru_") :][:10]
    refused = lines[-1]
    assert (refused["status"], refused["code"], refused["token"]) == (401, "UNAUTHENTICATED", None)
    for secret in (made["token"], world.operator_token, world.acme.http.headers["Authorization"], "nonsense"):
        assert secret not in log.getvalue()


def test_the_description_of_the_surface(world: World) -> None:
    body = world.client(None).get("/openapi.json").json()
    assert body["info"]["title"] == "adapterd"
    assert "/v1/resolve" in body["paths"]
