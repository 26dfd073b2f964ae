"""A registry as a process of its own with the corpus's bases, and packages sent to it as they are."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adapterd.cli.client import RegistryClient, UploadInfo
from adapterd.cli.demo.server import Server, free_port, running_server
from adapterd.cli.demo.shell import Shell
from adapterd.loader.errors import error_from
from adapterd.loader.formats.archives import open_package
from adapterd.loader.formats.files import Package, file_entries, read_all
from adapterd.loader.identity import SIGNATURE_FILE
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.trust import oms
from adapterd.loader.trust.keys import PrivateKey, PublicKey, generate_publisher_key
from adapterd.loader.trust.policy import TrustStore
from corpus.verdicts import Case, Corpus


@dataclass(frozen=True)
class World:
    """A running registry with one tenant, one key, and the bases of the corpus."""

    operator: RegistryClient
    client: RegistryClient
    server: Server
    tenant: str
    read_token: str
    key: PrivateKey
    trust: TrustStore
    corpus: Corpus
    data_dir: Path

    @property
    def url(self) -> str:
        return self.server.url


@contextmanager
def running_world(corpus: Corpus, tenant: str) -> Iterator[World]:
    """Start the server with an empty home, and stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="adapterd-corpus-") as folder:
        home = Path(folder)
        operator_token = Shell("", "", home, home / "registry").run("db", "init")["operator_token"]
        with running_server(home / "registry", free_port()) as server:
            server.wait()
            with RegistryClient(server.url, operator_token) as operator:
                world = _open_tenant(operator, server, corpus, tenant, home / "registry")
                with world.client:
                    yield world


def _open_tenant(operator: RegistryClient, server: Server, corpus: Corpus, tenant: str, data_dir: Path) -> World:
    for name in corpus.base_names():
        operator.add_base(corpus.base(name))
    operator.create_tenant(tenant)
    scopes = ["adapters:read", "adapters:upload", "aliases:promote", "keys:admin"]
    token = operator.create_token(tenant, {"kind": "u", "scopes": scopes, "expires_in_days": 1, "adapters": ["*"]})
    client, key = RegistryClient(server.url, token["token"]), generate_publisher_key()
    client.add_key(tenant, "corpus", key.public.pem)
    trust = TrustStore()
    trust.add_publisher_key(tenant, key.public)
    for entry in client.admission_keys():
        trust.add_admission_key(PublicKey.from_pem(entry["public_key_pem"]))
    return World(operator, client, server, tenant, token["token"], key, trust, corpus, data_dir)


def published(world: World, case: Case) -> str:
    """Sign and upload a package without any check of ours first, so that the verdict is the server's. Its REF."""
    name = case.name.replace("_", "-")
    with open_package(case.path, DEFAULT_LIMITS) as package:
        files = file_entries(package)
        content = contents(package)
    content[SIGNATURE_FILE] = oms.sign(files, world.key, name=name)
    upload = sent(world, case, content, alias="prod")
    if upload.state != "admitted":
        raise error_from(upload.problems)
    return f"{world.tenant}/{name}:prod"


def contents(package: Package) -> dict[str, bytes]:
    """All bytes of a small package."""
    return {name: read_all(package.open(name)) for name in package.names() if not name.endswith("/")}


def sent(
    world: World,
    case: Case,
    content: Mapping[str, bytes],
    *,
    alias: str | None = None,
    declared: Mapping[str, str] | None = None,
) -> UploadInfo:
    """One upload over HTTP, to its end. Raises what the server says at any step.

    Args:
        declared: SHA-256 by name where the uploader claims another than the true one.
    """
    base = world.corpus.base(case.base)
    files = [
        {"path": path, "size": len(data), "sha256": (declared or {}).get(path, hashlib.sha256(data).hexdigest())}
        for path, data in content.items()
    ]
    wanted = {
        "adapter": case.name.replace("_", "-"), "base": {"id": base.id, "revision": base.revision},
        "files": files, "allow": [], "alias": alias,
    }  # fmt: skip
    upload = world.client.create_upload(world.tenant, wanted, case.name)
    for path, data in content.items():
        if data:
            world.client.send_chunk(world.tenant, upload.id, path, 0, data)
    upload = world.client.finalize(world.tenant, upload.id)
    while upload.state == "processing":
        upload = world.client.upload(world.tenant, upload.id)
    return upload
