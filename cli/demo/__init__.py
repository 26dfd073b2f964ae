"""`adapterctl demo`: the main job on embedded defaults, start to end, and then attacks on it.

A server on a loopback port with SQLite and local blobs; two tenants with keys and tokens; a small
transformer as base; adapters published by adapterctl's own code; a worker that loads them, runs one
mixed batch and compares each row in float64 with merged weights; then the refusals.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adapterd.cli.demo.report import demo_report
from adapterd.cli.demo.server import free_port, running_server
from adapterd.cli.demo.shell import Shell
from adapterd.cli.demo.world import (
    ADAPTERS,
    BASE_ID,
    BASE_REVISION,
    OTHER_REVISION,
    AdapterPlan,
    build_base,
    write_adapter,
)
from adapterd.cli.output import note
from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from adapterd.cli.demo.serving import Request
    from adapterd.cli.output import Report
    from adapterd.loader.trust.policy import TrustStore

TENANTS = ("acme", "globex")


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant's user: a shell with a token, a signing key, and the folders it published."""

    shell: Shell
    key: Path
    folders: dict[str, Path]


def run_demo(*, device: str = "cpu", keep: Path | None = None) -> Report:
    """Run all of it; the report's status is 1 if anything differs from what it must be.

    Args:
        device: where the worker's cache and model live, `cpu` or `cuda:0`.
        keep: a folder that does not exist yet, to look at afterwards; None for a temporary one.

    Raises:
        Failed: SETTINGS_INVALID if torch or transformers are not installed.
        Conflict: ALREADY_EXISTS if `keep` is there.
    """
    _need_extras()
    begin = time.perf_counter()
    with _workspace(keep) as home:
        data_dir = home / "registry"
        operator_token = _initialise(data_dir)
        with running_server(data_dir, free_port()) as server:
            note("==> server starting, base model being made")
            model = build_base(home / "base")
            url = server.wait()
            operator = Shell(url, operator_token, home / "operator")
            note(f"==> server ready at {url} (SQLite and local blobs in {data_dir})")
            _register_bases(operator, home / "base")
            tenants = {name: _open_tenant(operator, name, home) for name in TENANTS}
            for plan in ADAPTERS:
                _publish(tenants[plan.tenant], plan, home)
            return _serve_and_attack(operator, tenants, model, device, home, begin)


def _serve_and_attack(
    operator: Shell, tenants: dict[str, Tenant], model: object, device: str, home: Path, begin: float
) -> Report:
    import torch

    from adapterd.cli.demo.attacks import Scene, all_attacks
    from adapterd.cli.demo.serving import live_base, serve_mixed_batch, worker_cache

    assert isinstance(model, torch.nn.Module)
    worker_token = operator.run(
        "token", "create", "--all-tenants", "--kind", "w", "--scope", "adapters:read", "--days", "1"
    )["token"]
    trust = _worker_trust(operator, tenants)
    base = live_base(model)
    note(f"==> worker: loading and serving on {device}, its trust file pins the publishers' keys")
    with worker_cache(operator.url, worker_token, trust, base, device, home / "stores" / "main") as cache:
        served = serve_mixed_batch(cache, model, _requests(tenants), device)
    note("==> attacks")
    acme, globex = tenants["acme"], tenants["globex"]
    scene = Scene(
        home, home / "registry", operator.url, worker_token, trust, base,
        acme.shell, globex.shell, acme.folders["finance"], acme.key,
    )  # fmt: skip
    return demo_report(served, all_attacks(scene), device, time.perf_counter() - begin)


def _need_extras() -> None:
    missing = [m for m in ("torch", "transformers") if importlib.util.find_spec(m) is None]
    if missing:
        raise error(
            Code.SETTINGS_INVALID, "demo", f"{' and '.join(missing)} must be installed for the demo's worker",
            "Install adapterd[worker,transformers].",
        )  # fmt: skip


@contextmanager
def _workspace(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="adapterd-demo-") as folder:
            yield Path(folder)
        return
    if keep.exists():
        raise error(Code.ALREADY_EXISTS, str(keep), "the demo makes this folder itself", "Name one that is not there.")
    keep.mkdir(parents=True)
    yield keep.resolve()


def _initialise(data_dir: Path) -> str:
    """What `adapterctl db init` does, with the settings pointing at `data_dir`. Returns the operator's token."""
    shell = Shell("", "", data_dir.parent / "operator", data_dir)
    token: str = shell.run("db", "init")["operator_token"]
    return token


def _register_bases(operator: Shell, folder: Path) -> None:
    for revision in (BASE_REVISION, OTHER_REVISION):
        operator.run("base", "add", folder, "--id", BASE_ID, "--revision", revision)


def _open_tenant(operator: Shell, name: str, home: Path) -> Tenant:
    """A tenant with one key and one token for its author."""
    operator.run("tenant", "create", name)
    scopes = ("adapters:read", "adapters:upload", "aliases:promote", "keys:admin")
    chosen = [word for scope in scopes for word in ("--scope", scope)]
    token: str = operator.run("token", "create", "--tenant", name, *chosen, "--days", "1")["token"]
    shell = Shell(operator.url, token, home / name)
    shell.home.mkdir()
    key = shell.home / "publisher.pem"
    shell.run("keygen", key)
    shell.run("key", "add", name, f"{key}.pub", "--name", "demo")
    note(f"==> tenant {name}: one key, one token")
    return Tenant(shell, key, {})


def _publish(tenant: Tenant, plan: AdapterPlan, home: Path) -> None:
    folder = write_adapter(plan, home / "adapters" / plan.tenant / plan.name)
    base = f"{BASE_ID}@{BASE_REVISION}"
    told = tenant.shell.run("upload", folder, plan.ref, "--base", base, "--sign", tenant.key, "--alias", "prod")
    tenant.folders[plan.name] = folder
    note(f"==> published {plan.ref}:prod, version {told['version']['number']}, rank {plan.rank}, alpha {plan.alpha:g}")


def _worker_trust(operator: Shell, tenants: dict[str, Tenant]) -> TrustStore:
    """The worker's own trust: the service's admission key, and each tenant's publisher key."""
    from adapterd.cli.client import RegistryClient
    from adapterd.loader.trust.keys import PublicKey
    from adapterd.loader.trust.policy import TrustStore

    trust = TrustStore()
    with RegistryClient(operator.url, operator.token) as client:
        for entry in client.admission_keys():
            trust.add_admission_key(PublicKey.from_pem(entry["public_key_pem"]), "demo")
    for name, tenant in tenants.items():
        trust.add_publisher_key(name, PublicKey.from_pem(Path(f"{tenant.key}.pub").read_text()), "demo")
    return trust


def _requests(tenants: dict[str, Tenant]) -> tuple[Request, ...]:
    """The mixed batch: base rows, both tenants' adapters, a composition, and one adapter twice."""
    from adapterd.cli.demo.serving import Request

    finance, legal = (tenants["acme"].folders[name] for name in ("finance", "legal"))
    code = tenants["globex"].folders["code"]
    both = (("acme/finance:prod", 0.75), ("acme/legal:prod", 0.5))
    return (
        Request("base", "acme", None, ()),
        Request("acme/finance", "acme", "acme/finance:prod", ((finance, 1.0),)),
        Request("globex/code", "globex", "globex/code:prod", ((code, 1.0),)),
        Request("acme/legal", "acme", "acme/legal:prod", ((legal, 1.0),)),
        Request("base", "globex", None, ()),
        Request("0.75 finance + 0.5 legal", "acme", both, ((finance, 0.75), (legal, 0.5))),
        Request("acme/finance", "acme", "acme/finance:prod", ((finance, 1.0),)),
    )
