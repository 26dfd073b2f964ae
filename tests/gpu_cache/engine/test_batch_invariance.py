"""I18: in batch-invariant mode a row's bits do not depend on its neighbours, their order or their number.

One layer is called, so that the base's own product is not in question: it is the same for all rows.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from fakes.static_cache import StaticCache


class Zero(nn.Module):
    """A base whose output is 0 for every batch: what is left is the delta."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.out_features)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out", "rank"), [(48, 24, 3), (576, 130, 8), (4096, 64, 24), (64, 4096, 16)])
def test_a_row_keeps_its_bits_in_any_company(width: int, out: int, rank: int, dtype: torch.dtype, threads: int) -> None:
    layer = Zero(width, out)
    model = nn.ModuleDict({"x": layer})
    base = BaseSpec.from_module(model, id="tests/zero", revision="d" * 40)
    cache = StaticCache(base, page_bytes=1 << 16, n_pages=64)
    mine, other = (cache.lease(cache.add({"x": rank}, seed=s, dtype="F32")) for s in (1, 2))
    x = torch.randn(70, width, generator=torch.Generator().manual_seed(4)).to(dtype)
    engine = LoRAEngine(model, cache, batch_invariant=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with engine.step([(mine, 70)]) as step:
            whole = layer(x)
        assert step.receipt.batch_invariant
        for start, rows, ahead, behind in [
            (0, 1, 0, 0),
            (3, 2, 1, 0),
            (7, 15, 0, 9),
            (40, 30, 5, 2),
            (1, 16, 17, 3),
        ]:
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)) + start
            mixed = torch.cat([x[:ahead], x[order], x[:behind]])
            entries = [(other, ahead), (mine, rows), (None, behind)]
            with engine.step([e for e in entries if e[1]]):
                got = layer(mixed)[ahead : ahead + rows]
            assert torch.equal(got, whole[order])
    finally:
        torch.set_num_threads(before)
