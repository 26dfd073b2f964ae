"""A registry that runs, with a shell for its operator and one for each of two tenants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fakes.commands import Commands
from fakes.packages import TINY_ID, TINY_REVISION, tiny_llama_spec
from fakes.server import RunningRegistry, running_registry

PINNED = f"{TINY_ID}@{TINY_REVISION}"
SCOPES = ("adapters:read", "adapters:upload", "aliases:promote", "keys:admin")


@dataclass(frozen=True)
class ShellWorld:
    """A registry with two tenants, a shell each, and acme's signing key."""

    registry: RunningRegistry
    operator: Commands
    acme: Commands
    globex: Commands
    key: Path


@contextmanager
def shell_world(root: Path) -> Iterator[ShellWorld]:
    """Everything in the folder `root`."""
    with running_registry(root / "registry") as registry:
        operator = _shell(root, registry, "operator", registry.operator_token)
        table = root / "base.json"
        tiny_llama_spec().save(table)
        assert operator.json("base", "add", table)["modules"] == len(tiny_llama_spec().modules)
        acme, globex = (_tenant(root, registry, operator, name) for name in ("acme", "globex"))
        key = root / "acme.pem"
        acme.json("keygen", key)
        acme.json("key", "add", "acme", f"{key}.pub", "--name", "release")
        acme.json("trust", "init", "--from-server")
        acme.json("trust", "add-key", f"{key}.pub", "--tenant", "acme")
        yield ShellWorld(registry, operator, acme, globex, key)


def _shell(root: Path, registry: RunningRegistry, name: str, token: str) -> Commands:
    home = root / f"home-{name}"
    home.mkdir()
    return Commands(home, {"ADAPTERD_URL": registry.url, "ADAPTERD_TOKEN": token})


def _tenant(root: Path, registry: RunningRegistry, operator: Commands, name: str) -> Commands:
    assert operator.json("tenant", "create", name)["tenant"]["name"] == name
    scopes = [word for scope in SCOPES for word in ("--scope", scope)]
    return _shell(root, registry, name, operator.json("token", "create", name, *scopes)["token"])
