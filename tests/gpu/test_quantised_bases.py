"""Quantised linears on the device, with the kernels behind them: torch's own, whose packing is CUDA's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from fakes.quantised_layers import N_IN, TORCH_CUDA, plain_linear
from fakes.served_layer import check_quantised
from fakes.static_cache import StaticCache

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = "cuda:0"
NEEDS_FP8_TENSOR_CORES = (8, 9)


def skip_without_fp8(name: str) -> None:
    if "_scaled_mm" in name and torch.cuda.get_device_capability(CUDA) < NEEDS_FP8_TENSOR_CORES:
        pytest.skip("torch._scaled_mm needs sm_89")


@pytest.mark.parametrize("each", [3, 50], ids=["rows", "tiles"])
@pytest.mark.parametrize("name", TORCH_CUDA)
def test_kernels_add_to_what_a_quantised_linear_gives(name: str, each: int) -> None:
    skip_without_fp8(name)
    kernel = check_quantised(TORCH_CUDA[name], "triton", device=CUDA, each=each)
    assert kernel == ("triton:rows" if each == 3 else "triton:tiles")


@pytest.mark.parametrize("name", TORCH_CUDA)
def test_the_reference_does_the_same(name: str) -> None:
    skip_without_fp8(name)
    assert check_quantised(TORCH_CUDA[name], device=CUDA, each=3) == "reference:torch"


@pytest.mark.parametrize("name", TORCH_CUDA)
def test_a_captured_graph_of_a_quantised_linear_has_the_same_bits(name: str) -> None:
    skip_without_fp8(name)
    made = TORCH_CUDA[name](plain_linear())
    model = nn.ModuleDict({"layer": made.layer}).eval().to(CUDA)
    base = BaseSpec.from_module(model, id="tests/quantised", revision="d" * 40)
    dtype = "F32" if made.dtype is torch.float32 else "BF16"
    cache = StaticCache(base, dtype=dtype, device=CUDA)
    first, second = (cache.add({"layer": rank}, seed=rank, dtype=dtype) for rank in (8, 16))
    x = torch.randn(18, N_IN, device=CUDA).to(made.dtype)
    alone = model["layer"](x)
    with LoRAEngine(model, cache, kernels="triton", strict=True) as engine:

        def eager(*owners: object) -> Tensor:
            with engine.step(entries(*owners)):
                return model["layer"](x)  # type: ignore[no-any-return]

        def entries(*owners: object) -> list[tuple[object, int]]:
            return [(cache.lease((owner, 1.0)) if owner else None, 6) for owner in owners]

        wanted = [eager(first, None, second), eager(second, first, None)]
        graph = torch.cuda.CUDAGraph()
        with engine.step(entries(first, None, second)) as step, torch.cuda.graph(graph):
            got = model["layer"](x)
        graph.replay()
        assert torch.equal(got, wanted[0])
        with engine.step(entries(second, first, None), shape=step.shape):
            graph.replay()
        assert torch.equal(got, wanted[1])
    assert torch.equal(got[12:], alone[12:])
    assert not torch.equal(got[:12], alone[:12])
