"""Both sources against one contract, then what only a network can do wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapterd.loader.errors import (
    AdapterdError,
    Code,
    Conflict,
    Failed,
    NotFound,
    Unauthenticated,
    Unavailable,
    Untrusted,
)
from adapterd.loader.identity import SIGNATURE_FILE, WEIGHTS_FILE, Ref
from adapterd.loader.sources import FolderSource, RegistrySource, Resolved, Source
from adapterd.loader.sources.registry import ATTEMPTS
from adapterd.loader.trust.keys import generate_publisher_key
from fakes.packages import tiny_llama_spec, write_package
from fakes.registry_simulator import URL, RegistrySimulator, SimVersion

BASE = tiny_llama_spec()
KEY = generate_publisher_key()


@dataclass
class World:
    """Two versions of acme/finance (the first is `prod`, the second `default`) and one of globex/secret."""

    registry: RegistrySimulator
    first: SimVersion
    second: SimVersion
    foreign: SimVersion


@pytest.fixture
def world(tmp_path: Path) -> World:
    registry = RegistrySimulator()

    def publish(ref: str, seed: int, key: Any = KEY) -> SimVersion:
        return registry.publish(ref, write_package(tmp_path / f"in{seed}", seed=seed).directory, BASE, key)

    first = publish("acme/finance:prod", 1)
    return World(registry, first, publish("acme/finance", 2, None), publish("globex/secret", 3))


def lay_out(registry: RegistrySimulator, root: Path) -> None:
    """What `adapterctl pull` leaves: package, statement beside it, aliases."""
    for (tenant, name), versions in registry.versions.items():
        folder = root / tenant / name
        aliases = {}
        for version in versions:
            package = folder / str(version.number)
            package.mkdir(parents=True)
            for path, data in version.files.items():
                (package / path).write_bytes(data)
            if version.signature is not None:
                (package / SIGNATURE_FILE).write_bytes(version.signature)
            (folder / f"{version.number}.admission.dsse.json").write_bytes(version.envelope)
            for (t, n, alias), digest in registry.aliases.items():
                if (t, n, digest) == (tenant, name, version.digest):
                    aliases[alias] = version.number
        (folder / "aliases.json").write_text(json.dumps(aliases))


@pytest.fixture(params=["folder", "registry"])
def source(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Iterator[Source]:
    if request.param == "folder":
        lay_out(world.registry, tmp_path / "root")
        made: Source = FolderSource(tmp_path / "root")
    else:
        made = world.registry.source()
    yield made
    made.close()


def refusal(call: Callable[[], object]) -> AdapterdError:
    with pytest.raises(AdapterdError) as caught:
        call()
    return caught.value


# --- the contract


def test_an_alias_and_the_default_alias(source: Source, world: World) -> None:
    prod = source.resolve(Ref.parse("acme/finance:prod"), "acme")
    assert (prod.version_digest, prod.version_number) == (world.first.digest, 1)
    assert prod.ref == Ref("acme", "finance", "prod", world.first.digest)
    assert prod.base == BASE.pin
    assert source.resolve(Ref.parse("acme/finance"), "acme").version_digest == world.second.digest


def test_a_digest_with_and_without_alias(source: Source, world: World) -> None:
    pinned = f"@sha256:{world.first.digest}"
    assert source.resolve(Ref.parse(f"acme/finance{pinned}"), "acme").version_number == 1
    assert source.resolve(Ref.parse(f"acme/finance:prod{pinned}"), "acme").version_number == 1
    found = refusal(lambda: source.resolve(Ref.parse(f"acme/finance:default{pinned}"), "acme"))
    assert isinstance(found, Conflict)
    assert found.code is Code.REF_CONFLICT


@pytest.mark.parametrize(
    "text", ["acme/nothing", "acme/finance:nothing", f"acme/finance@sha256:{'0' * 64}", "acme/nothing:prod"]
)
def test_what_is_not_there(source: Source, text: str) -> None:
    assert isinstance(refusal(lambda: source.resolve(Ref.parse(text), "acme")), NotFound)


def test_a_foreign_adapter_and_a_missing_one_answer_alike(source: Source, world: World) -> None:
    """I9. The two answers differ in nothing but the name that the caller gave."""
    foreign = refusal(lambda: source.resolve(Ref.parse("globex/secret"), "acme"))
    missing = refusal(lambda: source.resolve(Ref.parse("globex/absent"), "acme"))
    own = refusal(lambda: source.resolve(Ref.parse("acme/absent"), "acme"))

    def shape(found: AdapterdError) -> object:
        p = found.problem
        return type(found), p.code, p.message, p.hint

    assert shape(foreign) == shape(missing) == shape(own)
    assert (foreign.problem.where, missing.problem.where) == ("globex/secret", "globex/absent")


def test_statement_signature_and_bytes(source: Source, world: World) -> None:
    first = source.resolve(Ref.parse("acme/finance:prod"), "acme")
    assert source.statement(first) == world.first.envelope
    assert source.signature(first) == world.first.signature
    with source.read(first, WEIGHTS_FILE) as blocks:
        assert b"".join(blocks) == world.first.files[WEIGHTS_FILE]
    with source.read(first, WEIGHTS_FILE, 1000) as blocks:
        assert b"".join(blocks) == world.first.files[WEIGHTS_FILE][1000:]
    assert source.signature(source.resolve(Ref.parse("acme/finance"), "acme")) is None


def test_a_file_that_is_not_there(source: Source) -> None:
    first = source.resolve(Ref.parse("acme/finance:prod"), "acme")

    def read() -> None:
        with source.read(first, "tokenizer.json"):
            pass

    assert isinstance(refusal(read), NotFound)


def test_closing_twice_is_fine(source: Source) -> None:
    source.close()
    source.close()


# --- the folder


@pytest.fixture
def root(world: World, tmp_path: Path) -> Path:
    lay_out(world.registry, tmp_path / "root")
    return tmp_path / "root"


def test_a_version_without_its_statement(root: Path) -> None:
    (root / "acme" / "finance" / "1.admission.dsse.json").unlink()
    found = refusal(lambda: FolderSource(root).resolve(Ref.parse("acme/finance:prod"), "acme"))
    assert found.code is Code.STATEMENT_MISSING
    assert "adapterctl pull" in found.problem.hint


def test_a_broken_neighbour_does_not_hide_a_digest(root: Path, world: World) -> None:
    (root / "acme" / "finance" / "2.admission.dsse.json").write_bytes(b"{")
    ref = Ref.parse(f"acme/finance@sha256:{world.first.digest}")
    assert FolderSource(root).resolve(ref, "acme").version_number == 1


def test_a_folder_says_what_lies_there_now_whatever_it_said_before(root: Path, world: World) -> None:
    source, ref = FolderSource(root), Ref.parse("acme/finance:prod")
    pinned = replace(Ref.parse("acme/finance"), digest=world.second.digest)
    for _ in range(2):
        assert source.resolve(ref, "acme").version_digest == world.first.digest
        assert source.resolve(pinned, "acme").version_number == 2
    first = root / "acme" / "finance" / "1.admission.dsse.json"
    second = first.with_name("2.admission.dsse.json")
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    assert source.resolve(ref, "acme").version_digest == world.second.digest
    assert source.resolve(pinned, "acme").version_number == 1
    first.write_bytes(b"{")
    second.unlink()
    assert refusal(lambda: source.resolve(ref, "acme")).code is Code.STATEMENT_INVALID
    assert refusal(lambda: source.resolve(pinned, "acme")).code is Code.NOT_FOUND


@pytest.mark.parametrize("text", ["[]", '{"prod": "1"}', '{"prod": true}', '{"prod": 0}', "{", '{"a": 1, "a": 2}'])
def test_an_alias_file_that_is_none(root: Path, text: str) -> None:
    (root / "acme" / "finance" / "aliases.json").write_text(text)
    found = refusal(lambda: FolderSource(root).resolve(Ref.parse("acme/finance:prod"), "acme"))
    assert isinstance(found, Failed)


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    source = FolderSource(root)
    first = source.resolve(Ref.parse("acme/finance:prod"), "acme")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    weights = root / "acme" / "finance" / "1" / WEIGHTS_FILE
    weights.unlink()
    weights.symlink_to(secret)

    def read() -> None:
        with source.read(first, WEIGHTS_FILE) as blocks:
            b"".join(blocks)

    assert refusal(read).code is Code.STORAGE_UNAVAILABLE
    with pytest.raises(ValueError, match="plain"), source.read(first, "../2/adapter_config.json"):
        pass


# --- the network


def resolve(registry: RegistrySimulator, text: str = "acme/finance:prod") -> Resolved:
    return registry.source().resolve(Ref.parse(text), "acme")


def test_no_server_names_the_url_and_is_asked_a_few_times(world: World) -> None:
    world.registry.faults.refuse_connections = 100
    found = refusal(lambda: resolve(world.registry))
    assert isinstance(found, Unavailable)
    assert found.code is Code.SERVER_UNREACHABLE
    assert found.problem.where == URL
    assert "refused" in found.problem.message
    assert len(world.registry.requests) == ATTEMPTS
    assert len(world.registry.waited) == ATTEMPTS - 1


def test_a_real_port_where_nobody_listens() -> None:
    source = RegistrySource("http://127.0.0.1:9", "t", sleep=lambda _: None)
    found = refusal(lambda: source.resolve(Ref.parse("acme/finance"), "acme"))
    source.close()
    assert found.code is Code.SERVER_UNREACHABLE
    assert found.problem.where == "http://127.0.0.1:9"


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateway_in_trouble_is_asked_again(world: World, status: int) -> None:
    world.registry.faults.statuses = [status] * (ATTEMPTS - 1)
    assert resolve(world.registry).version_digest == world.first.digest
    world.registry.faults.statuses = [status] * ATTEMPTS
    assert isinstance(refusal(lambda: resolve(world.registry)), Unavailable)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (500, Code.SERVER_ERROR),
        (302, Code.SERVER_ERROR),
        (404, Code.SERVER_ERROR),
        (401, Code.UNAUTHENTICATED),
    ],
)
def test_a_wrong_answer_is_not_asked_again(world: World, status: int, code: Code) -> None:
    world.registry.faults.statuses = [status]
    assert refusal(lambda: resolve(world.registry)).code is code
    assert len(world.registry.requests) == 1


def answering(body: bytes | dict[str, Any], status: int = 200) -> RegistrySource:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
    return RegistrySource(URL, "t", transport, sleep=lambda _: None)


def test_a_problem_keeps_its_code_and_loses_its_control_characters() -> None:
    body = {"code": "TOKEN_EXPIRED", "detail": "gone\x1b[31m\n" + "x" * 5000, "where": "token", "hint": ""}
    found = refusal(lambda: answering(body, 401).resolve(Ref.parse("acme/a"), "acme"))
    assert isinstance(found, Unauthenticated)
    assert found.code is Code.TOKEN_EXPIRED
    assert found.problem.message.isprintable()
    assert len(found.problem.message) < 500


@pytest.mark.parametrize("body", [{"code": "NO_SUCH_CODE"}, {"code": ["NOT_FOUND"]}, {}, b"<html>", b"\xff" * 99])
def test_an_unknown_problem_is_told_by_its_status(body: Any) -> None:
    found = refusal(lambda: answering(body, 418).resolve(Ref.parse("acme/a"), "acme"))
    assert found.code is Code.SERVER_ERROR
    assert "418" in found.problem.message


@pytest.mark.parametrize(
    "change",
    [
        lambda i: i | {"ref": "acme/other"},
        lambda i: i | {"tenant": "globex"},
        lambda i: i | {"adapter": "other"},
        lambda i: i | {"version_digest": "short"},
        lambda i: i | {"number": 0},
        lambda i: i | {"base": {}},
        lambda i: {k: v for k, v in i.items() if k != "number"},
        lambda i: {"problem": {"code": "NONSENSE"}},
        lambda i: [],
    ],
)  # fmt: skip
def test_an_answer_that_is_none(world: World, change: Callable[[dict[str, Any]], Any]) -> None:
    world.registry.rewrite_resolved = change
    assert refusal(lambda: resolve(world.registry)).code is Code.SERVER_ERROR


def test_a_registry_that_moves_a_pinned_digest(world: World) -> None:
    world.registry.rewrite_resolved = lambda i: i | {"version_digest": world.second.digest}
    found = refusal(lambda: resolve(world.registry, f"acme/finance@sha256:{world.first.digest}"))
    assert found.code is Code.REF_CONFLICT


def test_a_quarantined_version(world: World) -> None:
    world.first.state = "quarantined"
    assert refusal(lambda: resolve(world.registry)).code is Code.VERSION_WITHDRAWN


def test_a_missing_statement_is_said_so(world: World) -> None:
    gone = replace(resolve(world.registry), version_digest="0" * 64)
    found = refusal(lambda: world.registry.source().statement(gone))
    assert isinstance(found, Untrusted)
    assert found.code is Code.STATEMENT_MISSING


def test_an_endless_answer_is_cut_off() -> None:
    sent = 0

    def zeros() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 65_536
            yield b" " * 65_536

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=zeros()))
    source = RegistrySource(URL, "t", transport)
    found = refusal(lambda: source.resolve(Ref.parse("acme/a"), "acme"))
    assert found.code is Code.SERVER_ERROR
    assert sent <= (1 << 20) + 2 * 65_536


def test_a_range_that_is_ignored_is_not_glued_on(world: World) -> None:
    world.registry.faults.ignore_range = True
    first = resolve(world.registry)

    def read() -> None:
        with world.registry.source().read(first, WEIGHTS_FILE, 100):
            pass

    assert refusal(read).code is Code.SERVER_ERROR


def test_a_file_s_name_cannot_reach_another_route(world: World) -> None:
    first = resolve(world.registry)

    def read() -> None:
        with world.registry.source().read(first, "../admission"):
            pass

    assert isinstance(refusal(read), NotFound)
    assert all("/files/" in request for request in world.registry.requests[1:])


@pytest.mark.parametrize("url", ["", "registry", "ftp://host", "http://", "http://[::1", "file:///etc/passwd"])
def test_what_is_no_url_of_a_registry(url: str) -> None:
    found = refusal(lambda: RegistrySource(url, "t"))
    assert found.code is Code.SETTINGS_INVALID


def test_an_answer_that_trickles_in_is_given_up(tmp_path: Path) -> None:
    """Each byte comes before the read times out: the whole answer has a time of its own."""
    now, sent = [0.0], [0]

    def trickle() -> Iterator[bytes]:
        while True:
            now[0] += 29.0
            sent[0] += 1
            yield b" "

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=trickle()))
    source = RegistrySource(URL, "t", transport, sleep=lambda _: None, clock=lambda: now[0])
    with pytest.raises(Unavailable) as slow:
        source.resolve(Ref.parse("acme/finance"), "acme")
    assert slow.value.code is Code.SERVER_UNREACHABLE
    assert sent[0] == 3 * ATTEMPTS
