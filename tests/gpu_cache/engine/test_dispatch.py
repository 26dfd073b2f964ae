"""Which kernels an engine gets, and that it says so."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.dispatch import adapter_dtype
from fakes.static_cache import StaticCache
from fakes.toy_models import HIDDEN, LINEARS, toy, toy_spec


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_on_the_cpu_the_reference_is_what_is_wanted(kernels: str) -> None:
    cache = StaticCache(toy_spec())
    lease, model = cache.lease(cache.add({LINEARS[0]: 2}, seed=1)), toy()
    with LoRAEngine(model, cache, kernels=kernels, strict=True) as engine, engine.step([(lease, 1)]) as step:  # type: ignore[arg-type]
        model(torch.ones(1, HIDDEN))
    assert (step.receipt.kernel, step.receipt.fallback, step.receipt.reasons) == ("reference:torch", False, ())
    assert step.shape is None


def test_kernels_that_cannot_run_here_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="auto, triton or reference"):
        LoRAEngine(toy(), StaticCache(toy_spec()), kernels="fast")  # type: ignore[arg-type]
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(ValueError, match="triton"):
            LoRAEngine(toy(), StaticCache(toy_spec()), kernels="triton")


@pytest.mark.parametrize(
    ("configured", "model", "wanted"),
    [
        ("auto", torch.bfloat16, "BF16"),
        ("auto", torch.float16, "F16"),
        ("auto", torch.float64, "F32"),
        ("F32", torch.bfloat16, "F32"),
    ],
)
def test_the_dtype_that_kernels_read(configured: str, model: torch.dtype, wanted: str) -> None:
    assert adapter_dtype(configured, nn.Linear(2, 2, dtype=model)) == wanted
