"""The engine on a CUDA device: the same results, IEEE fp32 whatever the process asked for, no host wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from fakes.batches import DISTRIBUTIONS, ROWS, adapters_of, batch, compositions
from fakes.merged import per_row
from fakes.static_cache import Adapter, StaticCache, StaticLease
from fakes.toy_models import FUSED, HIDDEN, LINEARS, STACKED, toy, toy_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = "cuda:0"
KERNELS = ["reference", "triton"]
ULPS = {torch.float64: 64, torch.float32: 16, torch.bfloat16: 2, torch.float16: 2}


@pytest.fixture
def cache() -> StaticCache:
    return StaticCache(toy_spec(), device=CUDA, n_pages=1500)


def run(engine: LoRAEngine, model: nn.Module, x: Tensor, rows: list[tuple[StaticLease | None, int]]) -> Tensor:
    with engine.step(rows) as step:
        y = model(x)
    assert step.receipt.device == CUDA
    if not step.receipt.fallback and any(lease is not None for lease, _ in rows):
        assert step.receipt.kernel.startswith("reference" if engine.kernels == "reference" else "triton")
    return y


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", list(ULPS))
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_each_row_gets_its_own_adapter(
    cache: StaticCache, distribution: str, dtype: torch.dtype, fused: bool, kernels: str
) -> None:
    owners = DISTRIBUTIONS[distribution]
    adapters = adapters_of(cache, max(owners) + 1, "BF16" if dtype == torch.bfloat16 else "F32")
    model, plain = toy(fused=fused, dtype=dtype, device=CUDA), toy(fused=fused, dtype=dtype)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = per_row(plain, x, compositions(adapters, owners), FUSED if fused else ())
    engine = LoRAEngine(model, cache, STACKED if fused else None, kernels=kernels)
    got = run(engine, model, x.to(CUDA), batch(cache, adapters, owners)).cpu()
    atol = ULPS[dtype] * torch.finfo(dtype).eps * float(wanted.abs().max())
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("kernels", KERNELS)
def test_base_rows_keep_their_bits_and_steps_repeat(cache: StaticCache, kernels: str) -> None:
    (adapter,) = adapters_of(cache, 1, "BF16")
    model = toy(dtype=torch.bfloat16, device=CUDA)
    x = torch.randn(12, HIDDEN, device=CUDA).bfloat16()
    before = model(x)
    engine = LoRAEngine(model, cache, kernels=kernels)
    rows = [(None, 5), (cache.lease(adapter), 3), (None, 4)]
    mixed = run(engine, model, x, rows)
    assert torch.equal(mixed[:5], before[:5])
    assert torch.equal(mixed[8:], before[8:])
    assert all(torch.equal(mixed, run(engine, model, x, rows)) for _ in range(5))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_step_never_waits_for_the_device(cache: StaticCache, kernels: str) -> None:
    """I13: torch raises on whatever would synchronise."""
    adapters = adapters_of(cache, 3)
    model, x = toy(device=CUDA), torch.randn(ROWS, HIDDEN, device=CUDA)
    rows = batch(cache, adapters, DISTRIBUTIONS["with base"])
    engine = LoRAEngine(model, cache, kernels=kernels)
    warm = run(engine, model, x, rows)
    run(engine, model, x, rows[::-1])  # another plan, so that the next one is made and sent
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        got = run(engine, model, x, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, warm)


class Zero(nn.Module):
    """A base that gives 0: what is left is the delta."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.out_features)


def one_layer(width: int, out: int, rank: int) -> tuple[nn.Module, StaticCache, Adapter]:
    model = nn.ModuleDict({"x": Zero(width, out)})
    base = BaseSpec.from_module(model, id="tests/zero", revision="d" * 40)
    cache = StaticCache(base, device=CUDA, page_bytes=1 << 20, n_pages=32, dtype="F32")
    return model, cache, cache.add({"x": rank}, seed=1)


@pytest.fixture
def precision_restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("precision_restored")
@pytest.mark.parametrize("interface", ["old", "new"])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_delta_is_ieee_fp32_though_the_process_has_tf32(
    interface: str, batch_invariant: bool, kernels: str
) -> None:
    model, cache, adapter = one_layer(4096, 1024, 16)
    f = adapter.modules["x"]
    x = torch.randn(64, 4096, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1))
    wanted = f.scaling * (x.double().cpu() @ f.a.double().T) @ f.b.double().T
    if interface == "old":
        torch.set_float32_matmul_precision("high")
    else:
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    def worst(y: Tensor) -> float:
        return float((y.double().cpu() - wanted).abs().max() / wanted.abs().max())

    plain = f.scaling * (x @ f.a.to(CUDA).T) @ f.b.to(CUDA).T
    assert worst(plain) > 1e-4, "TF32 is in force outside"
    engine = LoRAEngine(model, cache, batch_invariant=batch_invariant, kernels=kernels)
    with engine.step([(cache.lease(adapter), 64)]):
        got = model["x"](x)
    assert worst(got) < 2e-6
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.equal(f.scaling * (x @ f.a.to(CUDA).T) @ f.b.to(CUDA).T, plain), "and still is"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out", "rank"), [(48, 24, 3), (576, 130, 8), (4096, 1024, 64), (64, 14336, 16)])
@pytest.mark.parametrize("kernels", KERNELS)
def test_batch_invariant_rows_keep_their_bits(
    width: int, out: int, rank: int, dtype: torch.dtype, kernels: str
) -> None:
    model, cache, adapter = one_layer(width, out, rank)
    other = cache.add({"x": rank}, seed=2)
    mine, theirs = cache.lease(adapter), cache.lease(other)
    x = torch.randn(200, width, device=CUDA, generator=torch.Generator(CUDA).manual_seed(4)).to(dtype)
    engine = LoRAEngine(model, cache, batch_invariant=True, kernels=kernels)
    with engine.step([(mine, 200)]):
        whole = model["x"](x)
    for start, rows, ahead, behind in [
        (0, 1, 0, 0),
        (3, 2, 1, 0),
        (7, 15, 0, 9),
        (40, 130, 5, 2),
        (1, 16, 17, 3),
    ]:
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).to(CUDA) + start
        mixed = torch.cat([x[:ahead], x[order], x[:behind]])
        entries = [e for e in [(theirs, ahead), (mine, rows), (None, behind)] if e[1]]
        with engine.step(entries):
            got = model["x"](mixed)[ahead : ahead + rows]
        assert torch.equal(got, whole[order])


def test_the_real_cache_on_the_device(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    pytest.importorskip("re2")
    from adapterd.gpu_cache import AdapterCache, CacheConfig
    from fakes.publisher import FolderPublisher

    publisher = FolderPublisher(tmp_path / "published", toy_spec())
    packages = [publisher.publish("acme", f"a{i}", modules=LINEARS, rank=4 + i, alpha=8, seed=i) for i in range(4)]
    model, x = toy(device=CUDA), torch.randn(4, HIDDEN)
    config = CacheConfig(device=CUDA, vram_bytes=2 << 20, host_bytes=16 << 20)
    cache = AdapterCache(config, base=publisher.base, source=publisher.source, trust=publisher.trust)
    with cache, LoRAEngine(model, cache) as engine:
        for index in [0, 1, 2, 3, 2, 1, 0]:
            lease = cache.acquire(f"acme/a{index}", tenant="acme").wait(60)
            with engine.step([(lease, 3), (None, 1)]):
                got = model(x.to(CUDA)).cpu()
            lease.release()
            wanted = toy().double()
            for path, (a, b) in packages[index].factors.items():
                change = 8 / (4 + index) * torch.from_numpy(b).double() @ torch.from_numpy(a).double()
                wanted.get_submodule(path).weight += change
            torch.testing.assert_close(got[:3].double(), wanted(x[:3].double()), rtol=0, atol=1e-4)
            assert torch.equal(got[3], toy(device=CUDA)(x.to(CUDA)).cpu()[3])
