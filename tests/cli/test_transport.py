"""Foreign answers and broken networks become our errors, the most specific one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from adapterd.cli.client import RegistryClient
from adapterd.cli.transport import Transport, segment
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.identity import Ref


def _fault(answer: Callable[[httpx.Request], httpx.Response]) -> AdapterdError:
    with pytest.raises(AdapterdError) as caught:
        Transport("http://registry", "t", transport=httpx.MockTransport(answer)).json("GET", "/v1/whoami")
    return caught.value


def _problem(status: int, code: str, **more: Any) -> Callable[[httpx.Request], httpx.Response]:
    problem = {"code": code, "severity": "reject", "where": "w", "message": "m", "hint": "h"}
    body = {"status": status, "code": code, "detail": "m", "problems": [problem], **more}
    return lambda _: httpx.Response(status, json=body)


@pytest.mark.parametrize(
    ("status", "code", "exit_status"),
    [
        (401, "TOKEN_EXPIRED", 4),
        (404, "NOT_FOUND", 5),
        (412, "PRECONDITION_FAILED", 7),
        (422, "NONFINITE", 6),
        (503, "STORAGE_FULL", 8),
    ],
)
def test_the_servers_own_code_decides(status: int, code: str, exit_status: int) -> None:
    fault = _fault(_problem(status, code))
    assert (fault.code.value, fault.exit_status, str(fault.problem)) == (
        code,
        exit_status,
        f"{code} at w: m. h",
    )


def test_what_broke_in_the_server_may_work_later() -> None:
    fault = _fault(_problem(500, "INTERNAL"))
    assert (fault.code, fault.exit_status, fault.problem.message) == (Code.SERVER_ERROR, 8, "m (INTERNAL)")


def test_no_token_says_how_to_give_one() -> None:
    body = {
        "problems": [{"code": "UNAUTHENTICATED", "where": "Authorization", "message": "m", "hint": "Send a header."}]
    }
    fault = _fault(lambda _: httpx.Response(401, json=body))
    assert "ADAPTERD_TOKEN" in fault.problem.hint
    assert "ADAPTERD_TOKEN" in _fault(lambda _: httpx.Response(401)).problem.hint


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (httpx.Response(404, text="<html>"), Code.NOT_FOUND),
        (httpx.Response(502, text="bad gateway"), Code.SERVER_ERROR),
        (httpx.Response(429, json={}), Code.SERVER_ERROR),
        (httpx.Response(302, headers={"Location": "http://elsewhere/"}), Code.SERVER_ERROR),
        (httpx.Response(200, text="<html>"), Code.SERVER_ERROR),
        (httpx.Response(200, json=[]), Code.SERVER_ERROR),
        (
            httpx.Response(418, json={"problems": [{"code": "OF_TOMORROW"}], "detail": "d"}),
            Code.REQUEST_INVALID,
        ),
        (httpx.Response(409, json=7), Code.CONFLICT),
    ],
)
def test_answers_of_strangers(response: httpx.Response, code: Code) -> None:
    assert _fault(lambda _: response).code is code


@pytest.mark.parametrize("kind", [httpx.ConnectError, httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.WriteError])
def test_a_broken_network_is_unreachable(kind: type[httpx.TransportError]) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise kind("broken", request=request)

    fault = _fault(answer)
    assert (fault.code, fault.exit_status, fault.problem.where) == (
        Code.SERVER_UNREACHABLE,
        8,
        "http://registry",
    )


@pytest.mark.parametrize("url", ["registry.example", "ftp://x", "http://[::1", "http://x:port"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(AdapterdError) as caught:
        Transport(url, None).json("GET", "/v1/whoami")
    assert caught.value.code is Code.SETTINGS_INVALID


def test_lists_are_read_page_after_page() -> None:
    pages = {None: (["a", "b"], "1"), "1": (["c"], "2"), "2": ([], None)}

    def answer(request: httpx.Request) -> httpx.Response:
        names, following = pages[request.url.params.get("cursor")]
        return httpx.Response(200, json={"items": [{"name": n} for n in names], "next": following})

    client = RegistryClient("http://registry", "t", transport=httpx.MockTransport(answer))
    assert [t["name"] for t in client.tenants()] == ["a", "b", "c"]


def test_names_never_lead_to_another_path() -> None:
    assert [segment(s) for s in ("a/b", "..", ".", "a?b#c", "sha256:ab", "é")] == [
        "a%2Fb", "%2E%2E", "%2E", "a%3Fb%23c", "sha256:ab", "%C3%A9",
    ]  # fmt: skip
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path)
        return httpx.Response(200, json={"items": []})

    RegistryClient("http://registry", "t", transport=httpx.MockTransport(answer)).versions("../x", "y/z")
    assert seen == [b"/v1/tenants/..%2Fx/adapters/y%2Fz/versions?limit=200"]


@pytest.mark.parametrize("item", [{}, {"tenant": "t"}, {"tenant": "t", "base": 7}])
def test_an_answer_that_lacks_something_is_the_servers_fault(item: dict[str, Any]) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=json.dumps({"items": [item]}))

    client = RegistryClient("http://registry", "t", transport=httpx.MockTransport(answer))
    with pytest.raises(AdapterdError) as caught:
        client.resolve_one(Ref.parse("t/a"))
    assert caught.value.code is Code.SERVER_ERROR
