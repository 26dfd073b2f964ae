"""The demo's worker: load the adapters, run one mixed batch, compare every row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adapterd.cli.demo.reference import merged_logits
from adapterd.cli.demo.world import BASE_ID, BASE_REVISION, VOCABULARY
from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.sources import RegistrySource

if TYPE_CHECKING:
    import torch

    from adapterd.gpu_cache import Lease
    from adapterd.loader.trust.policy import TrustStore

PROMPT_TOKENS = 6
TOLERANCE = 2e-5
"""Of the largest logit: two fp32 forwards of four matrix products a layer, summed in different orders."""
WAIT_SECONDS = 60.0
CACHE_BYTES = 64 << 20

Wish = str | Sequence[tuple[str, float]] | None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence of the batch: who asks, for what, and the source folders that it must equal."""

    label: str
    tenant: str
    wish: Wish
    parts: tuple[tuple[Path, float], ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    """One sequence's comparison. `error` is relative to the largest logit; base rows must be bit-equal, too."""

    label: str
    rows: int
    error: float
    equal: bool
    how: str


@dataclass(frozen=True, slots=True)
class LoadTime:
    """Seconds from acquire to ready, first from the registry, then of the resident adapter."""

    label: str
    cold: float
    warm: float


@dataclass(frozen=True, slots=True)
class Served:
    """What the worker did."""

    rows: tuple[RowResult, ...]
    loads: tuple[LoadTime, ...]
    kernel: str
    digests: int


@contextmanager
def worker_cache(
    url: str, token: str, trust: TrustStore, base: BaseSpec, device: str, store: Path
) -> Iterator[AdapterCache]:
    """A started cache over `store`, which verifies everything itself."""
    config = CacheConfig(device=device, vram_bytes=CACHE_BYTES, host_bytes=CACHE_BYTES, dtype="F32", store=store)
    with (
        RegistrySource(url, token) as source,
        AdapterCache(config, base=base, source=source, trust=trust) as cache,
    ):
        yield cache


def serve_mixed_batch(cache: AdapterCache, model: torch.nn.Module, requests: Sequence[Request], device: str) -> Served:
    """Load what `requests` need, run them as one batch, and compare each with merged weights in float64."""
    import torch

    model.to(device)
    input_ids_BT = _prompts(len(requests)).to(device)
    with torch.no_grad():
        alone_BTV = model(input_ids=input_ids_BT).logits
    leases, loads = _load(cache, requests)
    engine = LoRAEngine(model, cache)
    try:
        with torch.no_grad(), engine.step([(lease, PROMPT_TOKENS) for lease in leases]) as step:
            mixed_BTV = model(input_ids=input_ids_BT).logits
    finally:
        engine.close()
        for lease in leases:
            if lease is not None:
                lease.release()
    rows = tuple(
        _compare(model, request, input_ids_BT[i], mixed_BTV[i], alone_BTV[i]) for i, request in enumerate(requests)
    )
    digests = {part.version_digest for segment in step.receipt.segments for part in segment.applied}
    return Served(rows, loads, step.receipt.kernel, len(digests))


def live_base(model: torch.nn.Module) -> BaseSpec:
    """The table of the model that will be served."""
    return BaseSpec.from_module(model, id=BASE_ID, revision=BASE_REVISION)


def _prompts(count: int) -> torch.Tensor:
    """Fixed token ids [count, PROMPT_TOKENS]."""
    import torch

    ids = (torch.arange(count * PROMPT_TOKENS) * 37 + 11) % (VOCABULARY - 1) + 1
    return ids.reshape(count, PROMPT_TOKENS)


def _load(cache: AdapterCache, requests: Sequence[Request]) -> tuple[list[Lease | None], tuple[LoadTime, ...]]:
    """One lease a request (None for the base), and how long each adapter took, cold and warm."""
    leases: list[Lease | None] = []
    loads: list[LoadTime] = []
    seen: set[str] = set()
    for request in requests:
        if request.wish is None:
            leases.append(None)
            continue
        lease, cold = _timed(lambda r=request: cache.acquire(r.wish, tenant=r.tenant).wait(WAIT_SECONDS))  # type: ignore[misc]
        leases.append(lease)
        if isinstance(request.wish, str) and request.wish not in seen:
            seen.add(request.wish)
            again, warm = _timed(lambda r=request: cache.acquire(r.wish, tenant=r.tenant).wait(WAIT_SECONDS))  # type: ignore[misc]
            again.release()
            loads.append(LoadTime(request.wish, cold, warm))
    return leases, tuple(loads)


def _timed(work: Callable[[], Lease]) -> tuple[Lease, float]:
    begin = time.perf_counter()
    lease = work()
    return lease, time.perf_counter() - begin


def _compare(
    model: torch.nn.Module,
    request: Request,
    ids_T: torch.Tensor,
    got_TV: torch.Tensor,
    alone_TV: torch.Tensor,
) -> RowResult:
    """Largest difference from the merged float64 model; base rows also bit for bit with the untouched base."""
    wanted_TV = merged_logits(model, request.parts, ids_T)
    difference = (got_TV.double().cpu() - wanted_TV).abs().max() / wanted_TV.abs().max()
    error = float(difference)
    if request.parts:
        return RowResult(request.label, len(ids_T), error, error <= TOLERANCE, "float64, merged weights")
    same_bits = bool((got_TV == alone_TV).all())
    return RowResult(request.label, len(ids_T), error, same_bits and error <= TOLERANCE, "bits, and float64")
