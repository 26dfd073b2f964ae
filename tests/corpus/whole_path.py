"""Every good adapter through the whole path, every unservable one refused by the server.

sign → upload over HTTP → admit → resolve → download → verify → pack → stage on the CPU device → forward
through `LoRAEngine` on the transformers model; then per-module scaling, module outputs and logits are
compared with what PEFT computed (expected.json, expected.safetensors).
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from adapterd.cli.client import RegistryClient
from adapterd.cli.demo.server import free_port, running_server
from adapterd.cli.demo.shell import Shell
from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, error_from
from adapterd.loader.formats.files import DirectoryPackage, file_entries
from adapterd.loader.identity import SIGNATURE_FILE
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.sources import RegistrySource
from adapterd.loader.trust import oms
from adapterd.loader.trust.keys import PrivateKey, PublicKey, generate_publisher_key
from adapterd.loader.trust.policy import TrustStore
from corpus.make_good import DTYPES, base_revision, build_base, fixed_x, run_model
from corpus.verdicts import Case, Corpus, Outcome

STAGE = "whole path"
TENANT = "corpus"
WAIT_SECONDS = 60.0
SCALE_TOLERANCE = 1e-9
MODULE_TOLERANCE = {"F32": 1e-4, "BF16": 3e-2}
"""Absolute and relative; the generator holds PEFT itself to the same."""


@dataclass
class Findings:
    """What one case was compared on, and what fell short."""

    logits_error: float = math.nan
    module_error: float = math.nan
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class World:
    """A running registry with one tenant, one key, and the bases of the corpus."""

    client: RegistryClient
    url: str
    read_token: str
    key: PrivateKey
    trust: TrustStore
    bases: Mapping[str, BaseSpec]
    references: Path


def whole_path(corpus: Corpus) -> Iterator[Outcome]:
    """Stage 2 of `make corpus`, one case after the other."""
    with _world(corpus.root) as world:
        for case in corpus.good():
            yield _accepted(world, case) if case.accepted else _refused(world, case)


@contextmanager
def _world(corpus: Path) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="adapterd-corpus-") as folder:
        home = Path(folder)
        operator_token = Shell("", "", home, home / "registry").run("db", "init")["operator_token"]
        with running_server(home / "registry", free_port()) as server:
            url = server.wait()
            with RegistryClient(url, operator_token) as operator:
                yield _open_tenant(operator, url, corpus)


def _open_tenant(operator: RegistryClient, url: str, corpus: Path) -> World:
    bases = {
        p.name: BaseSpec.from_directory(p, id=f"corpus/tiny-{p.name}", revision=base_revision(p.name))
        for p in sorted((corpus / "bases").iterdir())
    }
    for spec in bases.values():
        operator.add_base(spec)
    operator.create_tenant(TENANT)
    scopes = ["adapters:read", "adapters:upload", "aliases:promote", "keys:admin"]
    token = operator.create_token(TENANT, {"kind": "u", "scopes": scopes, "expires_in_days": 1, "adapters": ["*"]})
    client, key = RegistryClient(url, token["token"]), generate_publisher_key()
    client.add_key(TENANT, "corpus", key.public.pem)
    trust = TrustStore()
    trust.add_publisher_key(TENANT, key.public)
    for entry in client.admission_keys():
        trust.add_admission_key(PublicKey.from_pem(entry["public_key_pem"]))
    return World(client, url, token["token"], key, trust, bases, corpus / "good")


def _publish(world: World, case: Case) -> str:
    """Sign and upload a package without any check of ours first, so that the verdict is the server's. Its REF."""
    base = world.bases[case.base]
    name = case.name.replace("_", "-")
    with DirectoryPackage.open_dir(case.path, DEFAULT_LIMITS) as package:
        files = {e.path: e for e in file_entries(package)}
        content = {path: package.open(path).read_at(0, entry.size) for path, entry in files.items()}
    signature = oms.sign(files.values(), world.key, name=name)
    content[SIGNATURE_FILE] = signature
    declared = [
        {"path": path, "size": len(data), "sha256": files[path].sha256 if path in files else _sha256(data)}
        for path, data in content.items()
    ]
    wanted = {
        "adapter": name, "base": {"id": base.id, "revision": base.revision},
        "files": declared, "allow": [], "alias": "prod",
    }  # fmt: skip
    upload = world.client.create_upload(TENANT, wanted, case.name)
    for path, data in content.items():
        world.client.send_chunk(TENANT, upload.id, path, 0, data)
    upload = world.client.finalize(TENANT, upload.id)
    while upload.state == "processing":
        upload = world.client.upload(TENANT, upload.id)
    if upload.state != "admitted":
        raise error_from(upload.problems)
    return f"{TENANT}/{name}:prod"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _refused(world: World, case: Case) -> Outcome:
    wanted = str(case.expected["verdict"]).removeprefix("reject:")
    try:
        _publish(world, case)
    except AdapterdError as refusal:
        codes = sorted({p.code.value for p in refusal.problems})
        return Outcome(STAGE, case.name, wanted in codes, wanted, ", ".join(codes))
    return Outcome(STAGE, case.name, False, wanted, "admitted")


def _accepted(world: World, case: Case) -> Outcome:
    findings = Findings()
    try:
        _serve(world, case, _publish(world, case), findings)
    except AdapterdError as refusal:
        findings.faults.append(str(refusal))
    errors = f"modules {findings.module_error:.1e}, logits {findings.logits_error:.1e}"
    return Outcome(STAGE, case.name, not findings.faults, "equal to PEFT", "; ".join(findings.faults) or errors)


def _serve(world: World, case: Case, ref: str, findings: Findings) -> None:
    base_dtype = str(case.expected["base_dtype"])
    model = build_base(case.base).to(DTYPES[base_dtype])
    spec = world.bases[case.base]
    live = BaseSpec.from_module(model, id=spec.id, revision=spec.revision)
    if live.table_digest != spec.table_digest:
        findings.faults.append("the live model's table differs from the directory's")
    targets = [m["module"] for m in case.expected["modules"]]
    config = CacheConfig(vram_bytes=16 << 20, host_bytes=16 << 20, dtype="F32")
    with (
        RegistrySource(world.url, world.read_token) as source,
        AdapterCache(config, base=live, source=source, trust=world.trust) as cache,
        cache.acquire(ref, tenant=TENANT) as lease,
    ):
        lease.wait(WAIT_SECONDS)
        _compare_scaling(case, lease, findings)
        with LoRAEngine(model, cache, targets=targets) as engine:
            tensors = load_file(world.references / case.name / "expected.safetensors")
            _compare_modules(case, model, engine, lease, tensors, findings)
            _compare_logits(case, model, engine, lease, tensors, findings)


def _compare_scaling(case: Case, lease: Any, findings: Findings) -> None:
    ((resident, _),) = lease.composition
    found = {m.name: m.scaling for m in resident.manifest.modules}
    wanted = {m["module"]: m["scale"] for m in case.expected["modules"]}
    if found.keys() != wanted.keys():
        findings.faults.append(f"modules differ: {sorted(found.keys() ^ wanted.keys())[:3]}")
    for name in found.keys() & wanted.keys():
        if abs(found[name] - wanted[name]) > SCALE_TOLERANCE:
            findings.faults.append(f"{name}: scaling {found[name]}, PEFT has {wanted[name]}")


def _compare_modules(
    case: Case,
    model: torch.nn.Module,
    engine: Any,
    lease: Any,
    tensors: Mapping[str, torch.Tensor],
    findings: Findings,
) -> None:
    tolerance = MODULE_TOLERANCE[str(case.expected["base_dtype"])]
    worst = 0.0
    for module in case.expected["modules"]:
        layer = model.get_submodule(module["module"])
        x_ri = fixed_x(module["a_shape"][1]).to(layer.weight.dtype)
        with torch.no_grad():
            base_ro = layer(x_ri).float()
            with engine.step([(lease, len(x_ri))]):
                delta_ro = layer(x_ri).float() - base_ro
        wanted_ro = tensors[module["reference_tensor"]]
        worst = max(worst, float((delta_ro - wanted_ro).abs().max()))
        if not torch.allclose(delta_ro, wanted_ro, atol=tolerance, rtol=tolerance):
            findings.faults.append(
                f"{module['module']}: output differs by {float((delta_ro - wanted_ro).abs().max()):.2e}"
            )
    findings.module_error = worst


def _compare_logits(
    case: Case,
    model: torch.nn.Module,
    engine: Any,
    lease: Any,
    tensors: Mapping[str, torch.Tensor],
    findings: Findings,
) -> None:
    rows = tensors["input_ids"].numel()
    if not torch.equal(run_model(model), tensors["logits.base"]):
        gap = float((run_model(model) - tensors["logits.base"]).abs().max())
        if gap > case.expected["logits"]["tolerance"]:
            findings.faults.append(f"the base's own logits differ by {gap:.2e}")
    with engine.step([(lease, rows)]):
        logits = run_model(model)
    findings.logits_error = float((logits - tensors["logits.adapter"]).abs().max())
    if findings.logits_error > case.expected["logits"]["tolerance"]:
        findings.faults.append(f"logits differ by {findings.logits_error:.2e}")
