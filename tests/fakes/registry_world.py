"""What tests of the REST surface say and do: packages as bytes, tenants with their tokens, uploads in one call."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.identity import FileEntry, version_digest
from adapterd.loader.trust import oms
from adapterd.loader.trust.keys import PrivateKey, generate_publisher_key
from adapterd.registry.api.context import Context
from adapterd.registry.app import build_app
from adapterd.registry.services import Services
from adapterd.registry.tokens.interfaces import Scope
from fakes.packages import tiny_llama_spec, write_package

ALL_SCOPES = [scope.value for scope in Scope if scope is not Scope.OPERATOR]
TOKEN_SECRET = bytes(range(32))  # that of the `services` fixture
CONFIG, WEIGHTS, SIGNATURE = "adapter_config.json", "adapter_model.safetensors", "model.sig"


@dataclass(frozen=True)
class Package:
    """Files by name, and the base they are for."""

    files: Mapping[str, bytes]
    base: BaseSpec = field(default_factory=tiny_llama_spec)

    def changed(self, files: Mapping[str, bytes | None]) -> Package:
        """Files replaced, added or (None) removed."""
        kept = {**self.files, **files}
        return replace(self, files={name: data for name, data in kept.items() if data is not None})

    @property
    def entries(self) -> list[FileEntry]:
        return [FileEntry(n, hashlib.sha256(d).hexdigest(), len(d)) for n, d in self.files.items()]

    @property
    def digest(self) -> str:
        return version_digest(self.entries)

    def signed(self, key: PrivateKey) -> Package:
        return self.changed({SIGNATURE: oms.sign(self.entries, key, name="test")})

    def declaration(self, adapter: str, **over: Any) -> dict[str, Any]:
        base = {"id": self.base.id, "revision": self.base.revision}
        files = [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in self.entries]
        return {"adapter": adapter, "base": base, "files": files, **over}


def make_package(directory: Path, **options: Any) -> Package:
    """As `write_package` makes it, read back."""
    base = options.get("base") or tiny_llama_spec()
    written = write_package(directory, **options)
    names = sorted(p.name for p in written.directory.iterdir())
    return Package({name: (written.directory / name).read_bytes() for name in names}, base)


class Tenant:
    """One tenant's publisher: a client with all of its scopes, and a signing key that the registry knows."""

    def __init__(self, name: str, client: TestClient, key: PrivateKey) -> None:
        self.name = name
        self.http = client
        self.key = key

    def url(self, rest: str = "") -> str:
        return f"/v1/tenants/{self.name}{rest}"

    def version_url(self, adapter: str, version: str | int, rest: str = "") -> str:
        return self.url(f"/adapters/{adapter}/versions/{version}{rest}")

    def open(self, package: Package, adapter: str = "finance", **over: Any) -> dict[str, Any]:
        """A session for the package, nothing sent yet."""
        answer = self.http.post(self.url("/uploads"), json=package.declaration(adapter, **over))
        assert answer.status_code == 201, answer.text
        return answer.json()

    def patch(self, upload_id: str, path: str, data: Any, offset: int = 0) -> Any:
        return self.http.patch(
            self.url(f"/uploads/{upload_id}/files/{path}"),
            content=data,
            headers={"Upload-Offset": str(offset)},
        )

    def send(self, package: Package, adapter: str = "finance", **over: Any) -> str:
        """A session with all bytes sent; its id."""
        upload_id = self.open(package, adapter, **over)["id"]
        for name, data in package.files.items():
            answer = self.patch(upload_id, name, data)
            assert answer.status_code == 204, answer.text
        return str(upload_id)

    def send_all_but(self, package: Package, left_out: str, adapter: str = "finance", **over: Any) -> str:
        """A session with all bytes sent but those of one file; its id."""
        upload_id = str(self.open(package, adapter, **over)["id"])
        for name, data in package.files.items():
            if name != left_out:
                assert self.patch(upload_id, name, data).status_code == 204
        return upload_id

    def finalize(self, upload_id: str) -> Any:
        return self.http.post(self.url(f"/uploads/{upload_id}:finalize"))

    def show(self, upload_id: str) -> dict[str, Any]:
        answer = self.http.get(self.url(f"/uploads/{upload_id}"))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def publish(self, package: Package, adapter: str = "finance", **over: Any) -> dict[str, Any]:
        """Signed, sent and admitted; the version."""
        answer = self.finalize(self.send(package.signed(self.key), adapter, **over))
        assert answer.status_code == 202, answer.text
        assert answer.json()["state"] == "admitted"
        return answer.json()["version"]

    def resolve(self, *refs: str) -> list[dict[str, Any]]:
        answer = self.http.post("/v1/resolve", json={"refs": list(refs)})
        assert answer.status_code == 200, answer.text
        return answer.json()["items"]


@dataclass(frozen=True)
class Seed:
    """What a seeded registry's people know: the operator's token, and each tenant's token and signing key."""

    operator: str
    tenants: Mapping[str, tuple[str, PrivateKey]]


def seed_registry(services: Services) -> Seed:
    """Fill an empty registry: an operator, the tenants `acme` and `zeta`, and the tiny llama as a base model."""
    _, operator = services.tokens.issue(None, kind="u", scopes=["operator"], expires_in_days=1, actor="test")
    services.base_models.add(tiny_llama_spec(), actor="test")
    tenants = {}
    for name in ("acme", "zeta"):
        services.tenants.create(name, actor="test")
        key = generate_publisher_key()
        services.keys.add(name, "release", key.public.pem, actor="test")
        _, token = services.tokens.issue(name, kind="u", scopes=ALL_SCOPES, expires_in_days=366, actor="test")
        tenants[name] = (token, key)
    return Seed(operator, tenants)


class World:
    """A seeded registry's server, and clients of its people."""

    def __init__(self, context: Context, seed: Seed) -> None:
        self.context = context
        self.app = build_app(context)
        self._clients: list[TestClient] = []
        self.operator_token = seed.operator
        self.operator = self.client(seed.operator)
        self.base = tiny_llama_spec()
        self.acme = self._tenant("acme", *seed.tenants["acme"])
        self.zeta = self._tenant("zeta", *seed.tenants["zeta"])

    def client(self, token: str | None) -> TestClient:
        made = TestClient(self.app, raise_server_exceptions=False)
        if token:
            made.headers["Authorization"] = f"Bearer {token}"
        self._clients.append(made)
        return made

    def token(self, tenant: str, *scopes: str, adapters: tuple[str, ...] = ("*",)) -> str:
        """A token of a tenant with just these scopes."""
        return self.context.services.tokens.issue(
            tenant, kind="s", scopes=scopes, adapters=adapters, expires_in_days=1, actor="test"
        )[1]

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _tenant(self, name: str, token: str, key: PrivateKey) -> Tenant:
        return Tenant(name, self.client(token), key)
