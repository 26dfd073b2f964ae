"""One quantised linear under an engine, checked against the float64 weight that it stands for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.dispatch import Kernels
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.layout import Dtype
from fakes.merged import Composition
from fakes.quantised_layers import N_IN, N_OUT, Quantised, plain_linear
from fakes.static_cache import StaticCache

OUTPUT_ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
ROUNDED_H = 2
"""In tiles h is rounded to bf16 before its product, too."""


def check_quantised(
    build: Callable[[nn.Linear], Quantised], kernels: Kernels = "reference", *, device: str = "cpu", each: int = 2
) -> str:
    """Serve a mixed batch, and compare: each row with the dequantised weight and its own delta, in float64.

    The base's own distance from its dequantised weight (activations may be quantised, too) is not ours, so the
    served row may have that very distance, and a rounding of the output dtype on top.

    Args:
        device: where layer, rows and adapters are.
        each: rows of each entry of the batch.

    Returns:
        What the receipt calls the kernel.
    """
    made = build(plain_linear())
    model = nn.ModuleDict({"layer": made.layer}).eval().to(device)
    base = BaseSpec.from_module(model, id="tests/quantised", revision="d" * 40)
    assert base.modules == (BaseModule("layer", ModuleKind.LINEAR, N_IN, N_OUT),)
    dtype: Dtype = "F32" if made.dtype is torch.float32 else "BF16"
    cache = StaticCache(base, dtype=dtype, device=device)
    one, other = (cache.add({"layer": rank}, seed=rank, dtype=dtype) for rank in (5, 16))
    rows: list[Composition] = [
        [(one, 1.0)], [], [(other, 1.0)], [(one, 0.5), (other, -1.0)], [], [(one, 1.0)],
    ]  # fmt: skip
    x = torch.randn(each * len(rows), N_IN, generator=torch.Generator().manual_seed(4)).to(device, made.dtype)
    before, kept = model["layer"](x), made.kept()
    engine = LoRAEngine(model, cache, kernels=kernels, strict=kernels == "triton")
    assert engine.served == {"layer"}
    with engine.step([(cache.lease(*row) if row else None, each) for row in rows]) as step:
        after = model["layer"](x)
    assert after.dtype is before.dtype
    assert made.kept() == kept, "the packed weight was touched"
    for index, row in enumerate(rows):
        here = slice(each * index, each * (index + 1))
        if not row:
            assert torch.equal(after[here], before[here]), "a base row lost its bits"
            continue
        rounding = OUTPUT_ROUNDING[made.dtype] * (ROUNDED_H if step.receipt.kernel == "triton:tiles" else 1)
        _check_rows(made, row, x[here].double(), before[here].double(), after[here].double(), rounding)
    engine.close()
    assert torch.equal(model["layer"](x), before)
    return step.receipt.kernel


def _check_rows(made: Quantised, row: Composition, x: Tensor, before: Tensor, after: Tensor, rounding: float) -> None:
    own = made.weight.to(x.device)
    merged = own.clone()
    for adapter, weight in row:
        f = adapter.modules["layer"]
        merged += weight * f.scaling * (f.b.double() @ f.a.double()).to(x.device)
    bias = made.layer.bias() if callable(made.layer.bias) else made.layer.bias
    assert isinstance(bias, Tensor)
    wanted, plain = (x @ w.T + bias.double() for w in (merged, own))
    delta = wanted - plain
    assert delta.abs().max() > 0.3
    assert (before - plain).abs().max() < 0.1 * plain.abs().max(), "the dequantised weight is another one"
    assert ((after - wanted) - (before - plain)).abs().le(rounding * (after.abs() + before.abs() + 1)).all()
