"""The kernels on the device, at real widths: against float64, bit for bit, and in captured graphs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from adapterd.gpu_cache.engine.device_plan import LaunchShape
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.layout import Dtype
from fakes.one_linear import OneLinear, Owners, alone, close

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = "cuda:0"
LINEARS: Mapping[str, tuple[int, Sequence[int]]] = {
    "q": (4096, [4096]),
    "qkv": (4096, [4096, 1024, 1024]),
    "gate_up": (4096, [14336, 14336]),
    "down": (14336, [4096]),
    "odd": (576, [130, 33]),
}
RANKS = [1, 5, 8, 16, 24, 64, 128]
LAYER_OF: Mapping[Dtype, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def linear(name: str, ranks: Sequence[int], adapter: Dtype = "BF16", **options: object) -> OneLinear:
    width, parts = LINEARS[name]
    nbytes = sum(r * (width * len(parts) + sum(parts)) for r in ranks) * (4 if adapter == "F32" else 2)
    return OneLinear(
        width, parts, [[rank] * len(parts) for rank in ranks], LAYER_OF[adapter], adapter, CUDA,
        page_bytes=1 << 20, n_pages=2 * len(ranks) + 32 + (nbytes >> 19), engine_options=options,
    )  # fmt: skip


def check(world: OneLinear, owners: Owners, kernel: str, *, ulps: float = 2.0) -> Tensor:
    x, y = world.inputs(len(owners))
    got, receipt = world.run(x, y, owners)
    assert (receipt.kernel, receipt.fallback) == (kernel, False)
    close(got, world.wanted(x, y, owners), ulps=ulps)
    base = [row for row, mix in enumerate(owners) if not mix]
    assert torch.equal(got[base], y[base])
    return got


def shared_kernel(name: str) -> str:
    """What serves a few dozen rows an adapter: a small linear saves too little by tiles."""
    return "triton:rows" if name == "odd" else "triton:tiles"


def zipf(count: int, rows: int, seed: int = 0) -> list[int]:
    """−1, the base, is among them."""
    weights = [1.0 / (i + 1) ** 1.1 for i in range(count + 1)]
    return [i - 1 for i in random.Random(seed).choices(range(count + 1), weights, k=rows)]


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("name", LINEARS)
def test_mixed_ranks_in_both_regimes(name: str, pdl: bool) -> None:
    world = linear(name, RANKS, pdl=pdl)
    check(world, alone([6, -1, 0, 1, 2, 3, 4, 5, 5]), "triton:rows")
    check(world, alone(zipf(len(RANKS), 64)), shared_kernel(name))
    check(world, alone([i % 8 - 1 for i in range(200)]), shared_kernel(name))


@pytest.mark.parametrize("adapter", ["F32", "F16"])
@pytest.mark.parametrize("name", ["qkv", "down", "odd"])
def test_other_dtypes(name: str, adapter: Dtype) -> None:
    world = linear(name, RANKS, adapter)
    check(world, alone([6, -1, 0, 1, 2, 3, 4, 5, 5]), "triton:rows")
    check(world, alone([i % 8 - 1 for i in range(200)]), shared_kernel(name))


@pytest.mark.parametrize(
    ("layer", "adapter"), [(torch.bfloat16, "F32"), (torch.float16, "BF16"), (torch.float32, "F16")]
)
def test_layers_of_another_dtype_than_the_adapters(layer: torch.dtype, adapter: Dtype) -> None:
    world = OneLinear(1024, [512, 256], [[16, 16], [64, 5]], layer, adapter, CUDA, page_bytes=1 << 20, n_pages=32)
    check(world, alone([0, -1, 1, 1]), "triton:rows")
    check(world, alone([0, -1, 1, 1] * 50), "triton:tiles")


@pytest.mark.parametrize("name", ["q", "qkv", "gate_up", "down"])
def test_a_batch_of_distinct_adapters(name: str) -> None:
    world = linear(name, [16] * 64)
    order = random.Random(1).sample(range(64), 64)
    got = check(world, alone(order), "triton:rows")
    x, y = world.inputs(64)
    assert all(torch.equal(got, world.run(x, y, alone(order))[0]) for _ in range(5))
    check(world, alone(order[:1]), "triton:rows")


@pytest.mark.parametrize("ranks", [[16] * 8, [64] * 8, [8, 16, 32, 64, 128, 1, 5, 24]], ids=["r16", "r64", "mixed"])
@pytest.mark.parametrize("name", ["q", "qkv", "gate_up", "down"])
def test_prefill(name: str, ranks: Sequence[int]) -> None:
    world = linear(name, ranks)
    owners = alone([i for i in range(8) for _ in range(250)] + [-1] * 48)
    got = check(world, owners, "triton:tiles")
    x, y = world.inputs(2048)
    assert torch.equal(got, world.run(x, y, owners)[0])


def test_8192_rows() -> None:
    check(linear("q", [16, 64]), alone([0] * 5000 + [-1] * 192 + [1] * 3000), "triton:tiles")


def test_compositions() -> None:
    world = linear("qkv", [16, 5, 64, 128])
    mixes: Owners = [[(0, 0.5), (1, 2.0)], [(3, 1.0), (2, -0.5), (0, 0.25)], [], [(1, -1.0)], [(3, 1.0)]]
    check(world, mixes, "triton:rows")
    check(world, [mix for mix in mixes for _ in range(60)], "triton:tiles")


@pytest.mark.parametrize("rows", [9, 64, 200, 2048])
@pytest.mark.parametrize("name", ["qkv", "gate_up", "down"])
def test_dependent_launch_changes_no_bit(name: str, rows: int) -> None:
    ranks = [16, 64, 5, 128]
    plain, early = linear(name, ranks), linear(name, ranks, pdl=True)
    owners = alone(zipf(4, rows))
    x, y = plain.inputs(rows)
    got = [plain.run(x, y, owners)[0]] + [early.run(x, y, owners)[0] for _ in range(5)]
    assert all(torch.equal(got[0], other) for other in got[1:])


def test_a_nan_stays_in_its_own_row() -> None:
    world = linear("qkv", [16, 64, 16])
    for owners in (alone([0, 1, 2, -1]), alone([0, 1, 2, -1] * 40)):
        x, y = world.inputs(len(owners))
        wanted = world.wanted(x, y, owners)
        rows = [row for row, mix in enumerate(owners) if mix != [(1, 1.0)] and row != 0]
        x[0] = float("nan")
        resident = world.adapters[1].resident
        kept = world.cache.arena.clone()
        for page in resident.pages:
            world.cache.arena[page << 20 : (page + 1) << 20] = 0xFF
        got, _ = world.run(x, y, owners)
        close(got[rows], wanted[rows])
        assert got[:2].isnan().all()
        world.cache.arena.copy_(kept)


class Captured:
    """A layer captured in a step, with x and y of its own."""

    def __init__(self, world: OneLinear, owners: Owners) -> None:
        self.world = world
        self.x, self.y = world.inputs(len(owners), seed=9)
        world.model["p"].base = self.y
        with world.engine.step(world.entries(owners)) as step:  # type: ignore[arg-type]
            world.model["p"](self.x)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = world.model["p"](self.x)
        assert step.shape is not None
        self.shape: LaunchShape = step.shape

    def replay(self, owners: Owners, seed: int) -> Tensor:
        x, y = self.world.inputs(len(owners), seed)
        self.x.copy_(x)
        self.y.copy_(y)
        with self.world.engine.step(self.world.entries(owners), shape=self.shape):  # type: ignore[arg-type]
            self.graph.replay()
        close(self.out, self.world.wanted(x, y, owners))
        base = [row for row, mix in enumerate(owners) if not mix]
        assert torch.equal(self.out[base], y[base])
        return self.out.clone()


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("rows", [64, 256])
def test_a_graph_is_right_for_other_plans(rows: int, pdl: bool) -> None:
    """I22: adapters come and go, ranks change, rows move to other adapters and to the base."""
    world = linear("qkv", [64, 8, 16, 32] * 4, pdl=pdl)
    share = rows // 16
    captured = Captured(world, alone([4 * (i // share) % 16 for i in range(rows)] if rows > 64 else [0] * rows))
    rng = random.Random(2)
    for turn in range(25):
        gone = rng.randrange(16)
        rank = world.ranks[gone][0]
        world.cache.evict(world.adapters[gone])
        world.adapters[gone] = world.cache.add(
            dict.fromkeys(("p0", "p1", "p2")[: rng.choice((1, 3, 3))], rank), seed=100 + turn, dtype="BF16"
        )
        if rows > 64:
            order = [rng.randrange(-1, 16) for _ in range(16)]
            owners = alone([order[i // share] for i in range(rows)])
        else:
            owners = alone([rng.randrange(-1, 16) for _ in range(rows)])
        replayed = captured.replay(owners, turn)
        x, y = world.inputs(rows, turn)
        eager, receipt = world.run(x, y, owners, shape=captured.shape)
        assert receipt.kernel.startswith("triton:")
        assert torch.equal(replayed, eager)


def test_a_graph_of_an_all_base_step() -> None:
    world = linear("q", [16, 64])
    captured = Captured(world, alone([1] * 8))
    captured.replay(alone([-1] * 8), 1)
    captured.replay(alone([0, 1, -1, 1, 0, 0, 1, 1]), 2)


def test_what_cannot_be_captured_is_refused() -> None:
    world = linear("q", [16, 200], max_rank=128)
    x, y = world.inputs(2)
    world.run(x, y, alone([0, 1]))
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="captured"),
        world.engine.step(world.entries(alone([0, 1]))) as step,  # type: ignore[arg-type]
    ):
        assert step.shape is None
        with torch.cuda.graph(graph):
            world.model["p"](x)
    torch.cuda.synchronize()
    check(world, alone([0, -1]), "triton:rows")


@pytest.mark.parametrize("rows", [1, 17, 64, 700])
@pytest.mark.parametrize("name", ["q", "gate_up", "down"])
def test_batch_invariant_rows_keep_their_bits(name: str, rows: int) -> None:
    """A row alone, in any batch, whatever ranks its neighbours have."""
    world = linear(name, [16, 64, 128], batch_invariant=True)
    x, y = world.inputs(rows)
    owners = alone([i % 4 - 1 if rows > 1 else 0 for i in range(rows)])
    whole, _ = world.run(x, y, owners)
    for row in sorted({0, rows // 2, rows - 1}):
        one, _ = world.run(x[row : row + 1], y[row : row + 1], owners[row : row + 1])
        assert torch.equal(one[0], whole[row])


def test_another_stream_waits_for_the_one_before() -> None:
    world = linear("q", [16] * 32)
    owners = alone(list(range(32)))
    x, y = world.inputs(32)
    wanted = world.wanted(x, y, owners)
    torch.cuda.synchronize()
    for turn in range(6):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000 if turn % 2 == 0 else 1)
            order = owners if turn % 2 else owners[::-1]
            got, _ = world.run(x, y, order)
        if turn % 2:
            stream.synchronize()
            close(got, wanted)


def test_a_device_that_is_behind_is_an_error_and_no_wait() -> None:
    world = linear("q", [16, 16])
    x, y = world.inputs(1)
    world.run(x, y, alone([0]))
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    for turn in range(3):
        world.run(x, y, alone([1 - turn % 2]))
    world.run(x, y, alone([1]))  # the same plan again needs no room
    with pytest.raises(AdapterdError) as caught:
        world.run(x, y, alone([0]))
    assert caught.value.code is Code.PLAN_RING_FULL
    torch.cuda.synchronize()
    check(world, alone([0]), "triton:rows")
