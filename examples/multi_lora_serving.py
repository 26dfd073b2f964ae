"""The textbook experiment of multi-LoRA serving, on the real engine and cache, with real signed files.

Six requests share one base weight W [8, 5]. Two ask for adapter "finance", two for "code", two for the
base alone, all in one batch:

    y = x W + (alpha / rank) · (x A) B        with A [8, 2] and B [2, 5] of the row's own adapter

    python examples/multi_lora_serving.py

Each adapter is written as PEFT writes it, signed by its publisher, admitted by a registry key, and found
by the cache in a folder. The grouped result is held against a loop over single rows and against merged
weights, both computed here from the plain arrays.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.engine import LoRAEngine, Receipt
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import examine
from adapterd.loader.formats.files import DirectoryPackage, file_entries
from adapterd.loader.identity import WEIGHTS_FILE
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.sources import FolderSource
from adapterd.loader.trust import oms
from adapterd.loader.trust.admission import AdmissionStatement, chunk_digests, issue
from adapterd.loader.trust.keys import generate_admission_key, generate_publisher_key
from adapterd.loader.trust.policy import TrustStore

TENANT = "acme"
ROWS, IN, OUT, RANK = 6, 8, 5, 2
ALPHA = {"finance": 4, "code": 2}
ADAPTER_IDS = ["finance", "base", "code", "finance", "code", "base"]


@dataclass(frozen=True)
class Lora:
    """One adapter as textbooks have it: x @ a @ b, scaled by alpha / rank."""

    a: Tensor  # [in, rank]
    b: Tensor  # [rank, out]
    alpha: int

    @property
    def scaling(self) -> float:
        return self.alpha / RANK

    @property
    def parameters(self) -> int:
        return self.a.numel() + self.b.numel()


class Base(nn.Module):
    """The whole base model: one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(IN, OUT, bias=False)  # holds W transposed, [out, in]

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


def write_package(folder: Path, lora: Lora, base: BaseSpec) -> None:
    """The two files of a PEFT adapter. PEFT keeps A as [rank, in] and B as [out, rank]."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA", "base_model_name_or_path": base.id, "r": RANK, "lora_alpha": lora.alpha,
        "target_modules": ["proj"], "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    stored = {"lora_A": lora.a.T, "lora_B": lora.b.T}
    tensors = {f"base_model.model.proj.{name}.weight": value.contiguous() for name, value in stored.items()}
    save_file(tensors, folder / WEIGHTS_FILE)


class Publisher:
    """What a publisher, `adapterctl upload` and the registry do between them: sign, check, attest."""

    def __init__(self, root: Path, base: BaseSpec) -> None:
        self.root, self.base = root, base
        self.key, self.registry_key = generate_publisher_key(), generate_admission_key()

    def publish(self, name: str, lora: Lora) -> None:
        """Version 1 of the adapter, in the layout of `FolderSource`; the alias `default` points to it."""
        folder = self.root / TENANT / name / "1"
        write_package(folder, lora, self.base)
        with DirectoryPackage.open_dir(folder, DEFAULT_LIMITS) as package:
            files = file_entries(package)
            chunks = chunk_digests(package.open(WEIGHTS_FILE))
            verdict = examine(package, self.base, files=files)
        assert verdict.manifest is not None, verdict.problems
        signature = oms.sign(files, self.key, name=name)
        signed = oms.verify(signature, files, [self.key.public])
        statement = AdmissionStatement(
            tenant=TENANT, adapter=name, version_number=1, base=self.base.pin,
            version_digest=verdict.manifest.version_digest, files=files, chunks=chunks,
            oms_root_digest=signed.root_digest, signature_sha256=signed.bundle_sha256,
            publisher=signed.key_id, limits_id="example", policy_id="example", allowed=(),
            manifest_digest=verdict.manifest.digest, issued_at=datetime.now(UTC).replace(microsecond=0),
        )  # fmt: skip
        (folder / "model.sig").write_bytes(signature)
        (folder.parent / "1.admission.dsse.json").write_bytes(issue(statement, self.registry_key))
        (folder.parent / "aliases.json").write_text('{"default": 1}')

    def trust(self) -> TrustStore:
        """Whom a worker has to trust to serve these adapters."""
        trust = TrustStore()
        trust.add_publisher_key(TENANT, self.key.public)
        trust.add_admission_key(self.registry_key.public)
        return trust


def serve(model: Base, cache: AdapterCache, x: Tensor) -> tuple[Tensor, Receipt, Counter[str]]:
    """The batch in one step: row i of `x` gets adapter ADAPTER_IDS[i]. And the rows of each group."""
    leases = {name: cache.acquire(f"{TENANT}/{name}", tenant=TENANT) for name in ALPHA}
    names = {lease.wait(30).composition[0][0].key.digest: name for name, lease in leases.items()}
    with LoRAEngine(model, cache) as engine, engine.step([(leases.get(n), 1) for n in ADAPTER_IDS]) as step:
        y = model(x)
    for lease in leases.values():
        lease.release()
    return y, step.receipt, group_sizes(step.receipt, names)


def group_sizes(receipt: Receipt, names: dict[str, str]) -> Counter[str]:
    """How many rows got which adapter, as the receipt has it; `names` by version digest."""
    sizes: Counter[str] = Counter()
    for segment in receipt.segments:
        sizes[names[segment.applied[0].version_digest] if segment.applied else "base"] += segment.rows
    return sizes


def row_by_row(x: Tensor, w: Tensor, loras: dict[str, Lora]) -> Tensor:
    """The reference that nobody doubts: a loop over rows, in float64."""
    rows = []
    for row, name in zip(x.double(), ADAPTER_IDS, strict=True):
        y = row @ w.double()
        if name in loras:
            lora = loras[name]
            y = y + lora.scaling * (row @ lora.a.double()) @ lora.b.double()
        rows.append(y)
    return torch.stack(rows)


def merged(x: Tensor, w: Tensor, loras: dict[str, Lora]) -> Tensor:
    """One full weight an adapter, W + scaling · A B: what serving each adapter alone would hold in memory."""
    weights = {name: w.double() + a.scaling * a.a.double() @ a.b.double() for name, a in loras.items()}
    return torch.stack([row @ weights.get(name, w.double()) for row, name in zip(x.double(), ADAPTER_IDS, strict=True)])


def main() -> None:
    """Run the experiment; AssertionError if any of the three results differ."""
    torch.manual_seed(0)
    x, model = torch.randn(ROWS, IN), Base().requires_grad_(False)
    w = model.proj.weight.T
    loras = {n: Lora(torch.randn(IN, RANK), torch.randn(RANK, OUT), alpha) for n, alpha in ALPHA.items()}
    base = BaseSpec.from_module(model, id="textbook/linear", revision="0" * 40)

    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(Path(folder), base)
        for name, lora in loras.items():
            publisher.publish(name, lora)
        config = CacheConfig(vram_bytes=4 << 20, host_bytes=4 << 20)
        cache = AdapterCache(config, base=base, source=FolderSource(folder), trust=publisher.trust())
        with cache:
            grouped, receipt, sizes = serve(model, cache, x)

    row_difference = float((grouped.double() - row_by_row(x, w, loras)).abs().max())
    merged_difference = float((grouped.double() - merged(x, w, loras)).abs().max())
    parameters = {name: lora.parameters for name, lora in loras.items()}

    print(f"X {list(x.shape)}, W {list(w.shape)}, rank {RANK}, adapter ids {ADAPTER_IDS}")
    print(f"group sizes: {dict(sorted(sizes.items()))}, computed by {receipt.kernel} on {receipt.device}")
    print(f"largest difference to the row by row reference: {row_difference:.1e}")
    print(f"largest difference to merged weights:           {merged_difference:.1e}")
    print(f"parameters per adapter: {parameters}, the full weight: {w.numel()}")

    assert sizes == Counter(ADAPTER_IDS)
    assert max(row_difference, merged_difference) < 1e-5
    assert set(parameters.values()) == {RANK * (IN + OUT)}
    base_rows = [i for i, name in enumerate(ADAPTER_IDS) if name == "base"]
    assert torch.equal(grouped[base_rows], model(x)[base_rows]), "base rows keep their bits"


if __name__ == "__main__":
    main()
