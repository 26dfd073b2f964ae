"""`shrink` and `expand` start while the kernel before them still runs, and read what it writes only when it is done.

That kernel is any: here one that lets the next one start at once, and writes x or y late.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from adapterd.gpu_cache.engine.dispatch import DEPENDENT_LAUNCH_SINCE
from fakes.one_linear import OneLinear, alone

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < DEPENDENT_LAUNCH_SINCE,
        reason="needs programmatic dependent launch",
    ),
]
CUDA = "cuda:0"
BLOCK, READS = 1024, 200
WIDTH, PARTS = 1024, [512, 256, 256]
RANKS = [16, 64, 5, 128]


@triton.jit  # type: ignore[untyped-decorator]
def late_copy(source, target, size, reads, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whatever is launched behind it may start now; the copy is made after so many reads, one after the other."""
    tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < size)
    for _ in range(reads):
        values = tl.load(source + at, mask=at < size, volatile=True)
    tl.store(target + at, values, mask=at < size)


class Late(nn.Module):
    """A layer whose kernels write x (as no layer does) and its output, one of them last."""

    def __init__(self, x: Tensor, y: Tensor, last: str) -> None:
        super().__init__()
        self.in_features, self.out_features = x.shape[1], y.shape[1]
        self.sources = {"x": x.clone(), "y": y.clone()}
        self.targets = {"x": x, "y": y}
        self.order = sorted(self.sources, key=lambda name: name == last)

    def forward(self, _x: Tensor) -> Tensor:
        for name in self.order:
            source, target = self.sources[name], self.targets[name]
            target.fill_(float("nan"))
            late_copy[(triton.cdiv(source.numel(), BLOCK),)](source, target, source.numel(), READS, BLOCK)
        return self.targets["y"]


def served(late: Late, world: OneLinear, owners: Sequence[int], **options: object) -> Tensor:
    """What an engine makes of it, and the same out of a graph."""
    world.model["p"] = late
    engine = world.remade(**options)
    with engine, engine.step(world.entries(alone(owners))):  # type: ignore[arg-type]
        eager = [world.model["p"](late.targets["x"]).clone() for _ in range(5)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            world.model["p"](late.targets["x"])
        for _ in range(5):
            graph.replay()
            eager.append(late.targets["y"].clone())
    assert all(torch.equal(eager[0], other) for other in eager[1:])
    return eager[0]


@pytest.mark.parametrize("last", ["x", "y"])
@pytest.mark.parametrize("rows", [9, 300], ids=["rows", "tiles"])
def test_what_the_kernel_before_writes_is_read_when_it_is_done(rows: int, last: str) -> None:
    world = OneLinear(
        WIDTH, PARTS, [[rank] * len(PARTS) for rank in RANKS], torch.bfloat16, "BF16", CUDA, page_bytes=1 << 18
    )
    owners = [row % 5 - 1 for row in range(rows)]
    x, y = world.inputs(rows)
    late = Late(x, y, last)
    plain, early = (served(late, world, owners, pdl=pdl) for pdl in (False, True))
    assert not plain.isnan().any()
    assert torch.equal(plain, early)
