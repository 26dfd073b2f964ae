"""A registry with two versions of one adapter, and the root of a worker's store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adapterd.loader.errors import AdapterdError
from adapterd.loader.identity import Ref
from adapterd.loader.sources import Resolved
from adapterd.loader.store import StoredVersion, VerifiedStore
from adapterd.loader.trust.keys import PrivateKey, generate_publisher_key
from adapterd.loader.trust.policy import TrustStore
from fakes.packages import tiny_llama_spec, write_package
from fakes.registry_simulator import NOW, RegistrySimulator, SimVersion

BASE = tiny_llama_spec()
EVERY_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class World:
    """acme/finance in two versions (aliases `old` and `default`), and a worker's store."""

    registry: RegistrySimulator
    key: PrivateKey
    trust: TrustStore
    root: Path
    inbox: Path

    @classmethod
    def make(cls, folder: Path) -> World:
        registry, key = RegistrySimulator(), generate_publisher_key()
        trust = registry.trust()
        for tenant in ("acme", "globex"):
            trust.add_publisher_key(tenant, key.public)
        made = cls(registry, key, trust, folder / "store", folder / "inbox")
        made.publish("acme/finance:old", 1)
        package = {"modules": EVERY_LINEAR, "rank": 16, "files": {"README.md": b"# two\n"}}
        made.publish("acme/finance", 2, package=package)
        return made

    def publish(self, ref: str, seed: int, **options: Any) -> SimVersion:
        made = write_package(self.inbox / f"{seed}", seed=seed, **options.pop("package", {}))
        key = options.pop("key", self.key)
        return self.registry.publish(ref, made.directory, options.pop("base", BASE), key, **options)

    def store(self, **options: Any) -> VerifiedStore:
        return VerifiedStore(self.root, self.trust, **{"clock": lambda: NOW, **options})

    def resolve(self, text: str = "acme/finance") -> Resolved:
        ref = Ref.parse(text)
        return self.registry.source().resolve(ref, ref.tenant)

    def ensure(self, text: str = "acme/finance", store: VerifiedStore | None = None, **options: Any) -> StoredVersion:
        return (store or self.store()).ensure(self.resolve(text), self.registry.source(), BASE, **options)

    def fetched(self) -> list[str]:
        """The files that were asked for so far."""
        return [r.rsplit("/", 1)[1] for r in self.registry.requests if "/files/" in r]


OTHER_REVISION = tiny_llama_spec(revision="8" * 40)


def refusal(call: Callable[[], object]) -> AdapterdError:
    with pytest.raises(AdapterdError) as caught:
        call()
    return caught.value


def left(root: Path) -> list[str]:
    """What lies in the store beside its locks."""
    return sorted(p.name for p in root.iterdir() if p.name != ".locks")


def current(world: World) -> SimVersion:
    return world.registry.versions["acme", "finance"][1]


def as_folder(version: SimVersion, root: Path) -> None:
    """acme/finance, version 2 by default, as a folder of versions has it."""
    package = root / "acme" / "finance" / "2"
    package.mkdir(parents=True)
    for name, data in version.files.items():
        (package / name).write_bytes(data)
    assert version.signature is not None
    (package / "model.sig").write_bytes(version.signature)
    (package.parent / "2.admission.dsse.json").write_bytes(version.envelope)
    (package.parent / "aliases.json").write_text('{"default": 2}')
