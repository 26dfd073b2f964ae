"""An upload that breaks off is continued by the same command, from where the server is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from adapterd.cli.client import RegistryClient, VersionInfo
from adapterd.cli.uploader import Memory, Plan, Uploader
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.formats.files import DirectoryPackage, file_entries
from adapterd.loader.limits import DEFAULT_LIMITS
from fakes.commands import Commands
from fakes.packages import TINY_ID, TINY_REVISION, tiny_llama_spec, write_package
from fakes.server import RunningRegistry, running_registry

CHUNK = 1024
PINNED = f"{TINY_ID}@{TINY_REVISION}"


class Wire(httpx.BaseTransport):
    """The real network, with a say over each request: `before` may raise; so may `after`, once it is done."""

    def __init__(self) -> None:
        self.inner = httpx.HTTPTransport()
        self.before: Callable[[httpx.Request], None] = lambda _: None
        self.after: Callable[[httpx.Request], None] = lambda _: None
        self.offsets: list[tuple[str, int]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.before(request)
        if request.method == "PATCH":
            self.offsets.append((request.url.path.rsplit("/", 1)[-1], int(request.headers["Upload-Offset"])))
        response = self.inner.handle_request(request)
        response.read()
        self.after(request)
        return response

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        with RegistryClient(running.url, running.operator_token) as operator:
            operator.add_base(tiny_llama_spec())
            operator.create_tenant("acme")
            operator.set_policy("acme", {"require_signature": False})
        yield running


@pytest.fixture
def token(registry: RunningRegistry) -> str:
    wanted = {
        "kind": "u",
        "scopes": ["adapters:read", "adapters:upload"],
        "expires_in_days": 1,
        "adapters": ["*"],
    }
    with RegistryClient(registry.url, registry.operator_token) as operator:
        return str(operator.create_token("acme", wanted)["token"])


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


def _plan(folder: Path, name: str) -> Plan:
    with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package:
        return Plan("acme", name, TINY_ID, TINY_REVISION, file_entries(package), (), None)


def _send(
    registry: RunningRegistry, token: str, wire: Wire, folder: Path, plan: Plan, memory: Memory
) -> tuple[VersionInfo, int]:
    """The version, and the bytes that were said to have moved."""
    moved = []
    with (
        RegistryClient(registry.url, token, transport=wire) as client,
        DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package,
    ):
        version = Uploader(client, plan, package, memory, moved.append, chunk_bytes=CHUNK).run(resume=True)
    return version, sum(moved)


def _fail_once(on: int, fault: BaseException) -> Callable[[httpx.Request], None]:
    """Raises at the `on`-th PATCH, once."""
    seen = 0

    def hook(request: httpx.Request) -> None:
        nonlocal seen
        seen += request.method == "PATCH"
        if request.method == "PATCH" and seen == on:
            raise fault

    return hook


def test_ctrl_c_in_the_middle_then_the_command_again(
    registry: RunningRegistry, token: str, wire: Wire, package: Path, shell: Commands, tmp_path: Path
) -> None:
    plan, memory = _plan(package, "broken-off"), Memory(tmp_path / "memory.json")
    wire.before = _fail_once(4, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        _send(registry, token, wire, package, plan, memory)
    sent = list(wire.offsets)
    assert memory.load() is not None
    version, moved = _send(registry, token, wire, package, plan, memory)
    assert version.number == 1
    assert moved == plan.total_bytes  # what was there already counts as progress, too
    assert len(set(wire.offsets)) == len(wire.offsets)  # no byte was sent twice
    assert wire.offsets[: len(sent)] == sent
    assert memory.load() is None


def test_a_lost_connection_is_tried_again_and_a_lost_answer_is_not_sent_twice(
    registry: RunningRegistry, token: str, wire: Wire, package: Path, tmp_path: Path
) -> None:
    plan, memory = _plan(package, "lost"), Memory(tmp_path / "memory.json")
    wire.before = _fail_once(2, httpx.ConnectError("gone"))
    wire.after = _fail_once(3, httpx.ReadError("answer lost"))
    version, moved = _send(registry, token, wire, package, plan, memory)
    assert (version.digest, moved) == (version.digest, plan.total_bytes)
    assert [f.path for f in version.files] == ["adapter_config.json", "adapter_model.safetensors"]


def test_an_upload_that_the_server_forgot_starts_afresh(
    registry: RunningRegistry, token: str, wire: Wire, package: Path, tmp_path: Path
) -> None:
    plan, memory = _plan(package, "forgotten"), Memory(tmp_path / "memory.json")
    wire.before = _fail_once(3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        _send(registry, token, wire, package, plan, memory)
    with RegistryClient(registry.url, token) as client:
        known = client.create_upload("acme", plan.as_json(), str(memory.load()))
        assert sum(known.offsets.values()) > 0
        client.abandon_upload("acme", known.id)
    version, moved = _send(registry, token, wire, package, plan, memory)
    assert (version.number, moved) == (1, plan.total_bytes)


def test_files_that_changed_are_another_upload(
    registry: RunningRegistry, token: str, wire: Wire, tmp_path: Path
) -> None:
    folder = write_package(tmp_path / "p", seed=1).directory
    before = _plan(folder, "changed")
    write_package(folder, seed=2)
    after = _plan(folder, "changed")
    assert before.fingerprint(registry.url) != after.fingerprint(registry.url)
    assert after.fingerprint(registry.url) != after.fingerprint("http://elsewhere")


def test_what_was_admitted_while_nobody_listened_is_found(
    registry: RunningRegistry, token: str, wire: Wire, package: Path, tmp_path: Path
) -> None:
    plan, memory = _plan(package, "unheard"), Memory(tmp_path / "memory.json")

    def lose_the_verdict(request: httpx.Request) -> None:
        if request.url.path.endswith(":finalize"):
            raise httpx.ReadError("answer lost")

    wire.after = lose_the_verdict
    with pytest.raises(AdapterdError) as caught:
        _send(registry, token, wire, package, plan, memory)
    assert caught.value.code is Code.SERVER_UNREACHABLE
    wire.after = lambda _: None
    version, _ = _send(registry, token, wire, package, plan, memory)
    assert version.number == 1


def test_the_command_continues_by_itself(registry: RunningRegistry, token: str, package: Path, shell: Commands) -> None:
    """What a killed `adapterctl upload` remembers is found by the next one, and goes when it is done."""
    here = shell.with_variables(ADAPTERD_URL=registry.url, ADAPTERD_TOKEN=token)
    plan = _plan(package, "command")
    folder = shell.home / "state/adapterd/uploads"
    memory = Memory(folder / f"{plan.fingerprint(registry.url)}.json")
    key = memory.begin()
    with RegistryClient(registry.url, token) as client:
        opened = client.create_upload("acme", plan.as_json(), key)
    result = here.run("upload", package, "acme/command", "--base", PINNED, "-q")
    assert (result.exit_code, "continuing" in result.stderr) == (0, True)
    with RegistryClient(registry.url, token) as client:
        assert client.upload("acme", opened.id).state == "admitted"
    assert list(folder.iterdir()) == []


def test_a_broken_memory_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    begun = '{"schema": "adapterd.upload/1", "idempotency_key": "%s"}'
    foreign = [begun % key for key in ("", "0" * 31, "0" * 32 + "\\n", "X-Other: 1\\r\\n", "\u00fc" * 32)]
    for text in ("", "[]", "{", "[" * 60_000, '{"schema": "other"}', '{"schema": "adapterd.upload/1"}', *foreign):
        path.write_text(text)
        assert Memory(path).load() is None


def test_starting_over_gives_up_the_session_that_was_begun(
    registry: RunningRegistry, token: str, wire: Wire, package: Path, tmp_path: Path
) -> None:
    """It would hold the tenant's room until it expires."""
    plan, memory = _plan(package, "again"), Memory(tmp_path / "memory.json")
    wire.before = _fail_once(2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        _send(registry, token, wire, package, plan, memory)
    with (
        RegistryClient(registry.url, token, transport=wire) as client,
        DirectoryPackage.open_dir(package, DEFAULT_LIMITS) as opened,
    ):
        begun = client.create_upload("acme", plan.as_json(), str(memory.load()))
        assert begun.state == "open"
        assert Uploader(client, plan, opened, memory, lambda _: None).run(resume=False).number == 1
        with pytest.raises(AdapterdError) as caught:
            client.upload("acme", begun.id)
    assert caught.value.code is Code.NOT_FOUND


def test_nothing_is_remembered_of_a_session_that_was_not_opened(
    registry: RunningRegistry, token: str, wire: Wire, package: Path, tmp_path: Path
) -> None:
    memory = Memory(tmp_path / "memory.json")
    foreign = replace(_plan(package, "mine"), tenant="nobody")
    with pytest.raises(AdapterdError) as caught:
        _send(registry, token, wire, package, foreign, memory)
    assert (caught.value.code, memory.load()) == (Code.NOT_FOUND, None)


def test_a_file_that_changes_while_it_is_sent_ends_the_session_too(
    registry: RunningRegistry, token: str, wire: Wire, package: Path, tmp_path: Path
) -> None:
    """What was declared can never come any more: the session would hold the tenant's room until it expires."""
    plan, memory = _plan(package, "changing"), Memory(tmp_path / "memory.json")
    seen: list[str] = []

    def change(request: httpx.Request) -> None:
        if request.url.path.endswith(".safetensors") and not seen:
            seen.append(request.url.path.split("/uploads/")[1].split("/")[0])
            with (package / "adapter_model.safetensors").open("r+b") as file:
                file.write(b"another")

    wire.after = change
    with pytest.raises(AdapterdError) as caught:
        _send(registry, token, wire, package, plan, memory)
    assert (caught.value.code, memory.load()) == (Code.FILE_CHANGED, None)
    with RegistryClient(registry.url, token) as client, pytest.raises(AdapterdError) as gone:
        client.upload("acme", seen[0])
    assert gone.value.code is Code.NOT_FOUND
