"""Every good adapter through the whole path, every unservable one refused by the server.

sign → upload over HTTP → admit → resolve → download → verify → pack → stage on the CPU device → forward
through `LoRAEngine` on the transformers model; then per-module scaling, module outputs and logits are
compared with what PEFT computed (expected.json, expected.safetensors).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file

from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError
from adapterd.loader.sources import RegistrySource
from corpus.good.bases import DTYPES, build_base
from corpus.good.references import fixed_x, run_model
from corpus.running import World, published, running_world
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


def whole_path(corpus: Corpus) -> Iterator[Outcome]:
    """Stage 3 of `make corpus`, one case after the other."""
    with running_world(corpus, TENANT) as world:
        for case in corpus.good():
            yield accepted(world, case) if case.accepted else _refused(world, case)


def _refused(world: World, case: Case) -> Outcome:
    wanted = str(case.expected["verdict"]).removeprefix("reject:")
    try:
        published(world, case)
    except AdapterdError as refusal:
        codes = sorted({p.code.value for p in refusal.problems})
        return Outcome(STAGE, case.name, wanted in codes, wanted, ", ".join(codes))
    return Outcome(STAGE, case.name, False, wanted, "admitted")


def accepted(world: World, case: Case) -> Outcome:
    """Publish, serve and compare one good case."""
    findings = Findings()
    try:
        _serve(world, case, published(world, case), findings)
    except AdapterdError as refusal:
        findings.faults.append(str(refusal))
    errors = f"modules {findings.module_error:.1e}, logits {findings.logits_error:.1e}"
    return Outcome(STAGE, case.name, not findings.faults, "equal to PEFT", "; ".join(findings.faults) or errors)


def _serve(world: World, case: Case, ref: str, findings: Findings) -> None:
    base_dtype = str(case.expected["base_dtype"])
    model = build_base(case.base).to(DTYPES[base_dtype])
    spec = world.corpus.base(case.base)
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
            tensors = load_file(world.corpus.root / "good" / case.name / "expected.safetensors")
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
