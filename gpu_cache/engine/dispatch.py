"""Which kernels an engine gets: those in Triton on CUDA where Triton is, the reference elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from adapterd.loader.layout import Dtype

if TYPE_CHECKING:
    from adapterd.gpu_cache.engine.fast_path import FastPath
    from adapterd.gpu_cache.engine.layers import Site
    from adapterd.gpu_cache.engine.plan import ResidentLike, ServingCache

Kernels = Literal["auto", "triton", "reference"]
LEAST_CAPABILITY = (8, 0)
DEPENDENT_LAUNCH_SINCE = (9, 0)
_DTYPES: dict[torch.dtype, Dtype] = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def open_fast_path(
    kernels: Kernels,
    model: nn.Module,
    cache: ServingCache[Any],
    sites: Sequence[Site],
    check: Callable[[ResidentLike], object],
    *,
    max_rank: int,
    batch_invariant: bool,
    pdl: bool | None,
    tuning: Path | None = None,
) -> tuple[FastPath | None, str]:
    """(the kernels, or None for the reference; why the reference has to stand in for them, or nothing).

    Raises:
        ValueError: an unknown word, or Triton is demanded where it cannot run.
        Failed: SETTINGS_INVALID, `tuning` is no tuning table. NotFound: PATH_NOT_FOUND.
    """
    if kernels not in {"auto", "triton", "reference"}:
        raise ValueError(f"kernels={kernels!r}: use auto, triton or reference")
    if kernels == "reference":
        return None, ""
    why = _why_not(cache.arena.device)
    if kernels == "triton" and why:
        raise ValueError(f'kernels="triton": {why}')
    if why or (kernels == "auto" and cache.arena.device.type == "cpu"):
        return None, "" if cache.arena.device.type == "cpu" else why
    from adapterd.gpu_cache.engine.fast_path import FastPath

    dtype = adapter_dtype(cache.config.dtype, model)
    if pdl is None:
        device = cache.arena.device
        pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= DEPENDENT_LAUNCH_SINCE
    fast = FastPath(
        cache, sites, dtype, check, max_rank=max_rank, batch_invariant=batch_invariant, pdl=pdl, tuning=tuning
    )
    return fast, ""


def _why_not(device: torch.device) -> str:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return "" if capability >= LEAST_CAPABILITY else f"a card of compute capability {capability}, too old"
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return "" if interpreted else f"no kernels for {device.type} (on the CPU only Triton's interpreter)"


def adapter_dtype(configured: str, model: nn.Module) -> Dtype:
    """Of the adapters that kernels read: the cache's word, else the model's own dtype, else BF16."""
    for dtype in _DTYPES.values():
        if configured == dtype:
            return dtype
    return _DTYPES.get(model_dtype(model), "F32")


def model_dtype(model: nn.Module) -> torch.dtype:
    """Of its first parameter that is no packed weight (fp8 is a floating dtype, too); bf16 if it has none."""
    floats = (p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
    return next(floats, torch.bfloat16)
