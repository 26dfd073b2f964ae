"""The engine on the real cache: signed files in a folder, verified, packed, staged, applied."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adapterd.gpu_cache import AdapterCache, CacheConfig, Lease
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code
from fakes.packages import WrittenPackage
from fakes.publisher import FolderPublisher
from fakes.toy_models import FUSED, HIDDEN, LINEARS, STACKED, toy, toy_spec

MIB = 1 << 20
Parts = list[tuple[WrittenPackage, float, float]]  # (package, scaling, weight)


def merged(model: nn.Module, parts: Parts) -> nn.Module:
    """A float64 copy with the source files' factors merged in; knows the fused toy, too."""
    copied = copy.deepcopy(model).double()
    places = {path: (live, row) for path, live, row in FUSED}
    fused = any("qkv_proj" in name for name, _ in model.named_modules())
    for package, scaling, weight in parts:
        for path, (a, b) in package.factors.items():
            live, row = places.get(path, (path, 0)) if fused else (path, 0)
            change = weight * scaling * (b.astype(np.float64) @ a.astype(np.float64))
            copied.get_submodule(live).weight[row : row + len(b)] += torch.from_numpy(change)
    return copied


@pytest.fixture
def publisher(tmp_path: Path) -> FolderPublisher:
    return FolderPublisher(tmp_path / "published", toy_spec())


def cache_over(publisher: FolderPublisher, **settings: object) -> AdapterCache:
    config = CacheConfig(vram_bytes=8 * MIB, host_bytes=8 * MIB, **settings)  # type: ignore[arg-type]
    return AdapterCache(config, base=publisher.base, source=publisher.source, trust=publisher.trust)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_tenants_compositions_and_base_rows_in_one_batch(publisher: FolderPublisher, dtype: str, fused: bool) -> None:
    finance = publisher.publish("acme", "finance", modules=LINEARS, rank=5, alpha=10, dtype=dtype, seed=1)
    code = publisher.publish("acme", "code", modules=["q_proj", "up"], rank=20, alpha=10, dtype=dtype, seed=2)
    other = publisher.publish("globex", "finance", modules=["v_proj", "down"], rank=3, alpha=3, seed=3)
    model, plain = toy(fused=fused), toy(fused=fused)
    x = torch.randn(10, HIDDEN, generator=torch.Generator().manual_seed(1))
    mixes: list[Parts] = [
        [(finance, 2.0, 1.0)], [], [(other, 1.0, 1.0)],
        [(finance, 2.0, 0.5), (code, 0.5, -1.0)], [(code, 0.5, 1.0)],
    ]  # fmt: skip
    with cache_over(publisher) as cache, LoRAEngine(model, cache, STACKED if fused else None) as engine:
        leases = [
            cache.acquire("acme/finance", tenant="acme"),
            cache.acquire(None, tenant="acme"),
            cache.acquire("globex/finance", tenant="globex"),
            cache.acquire([("acme/finance", 0.5), ("acme/code", -1.0)], tenant="acme"),
            cache.acquire("acme/code", tenant="acme"),
        ]
        for lease in leases:
            lease.wait(30)
        with engine.step([(lease, 2) for lease in leases]) as step:
            got = model(x)
        for lease in leases:
            lease.release()
        assert cache.statistics().steps_in_flight == 0
    for index, mix in enumerate(mixes):
        rows = slice(2 * index, 2 * index + 2)
        wanted = merged(plain, mix)(x[rows].double())
        torch.testing.assert_close(got[rows].double(), wanted, rtol=0, atol=1e-4)
        if mix:
            assert (wanted - plain(x[rows])).abs().max() > 0.05
    assert torch.equal(got[2:4], plain(x)[2:4])
    tenants = [[a.tenant for a in s.applied] for s in step.receipt.segments]
    assert tenants == [["acme"], [], ["globex"], ["acme", "acme"], ["acme"]]


def run_one(engine: LoRAEngine[Lease | None], model: nn.Module, lease: Lease) -> Tensor:
    with engine.step([(lease, 1)]):
        return model(torch.ones(1, HIDDEN))


def test_leases_that_cannot_be_used_say_why(publisher: FolderPublisher) -> None:
    publisher.publish("acme", "finance", modules=["q_proj"])
    publisher.publish("acme", "wide", modules=["q_proj", "down"])
    model = toy()
    with cache_over(publisher) as cache, LoRAEngine(model, cache, targets=["q_proj"]) as engine:
        ready, wide = (cache.acquire(f"acme/{name}", tenant="acme").wait(30) for name in ("finance", "wide"))
        missing = cache.acquire("acme/nothing", tenant="acme")
        with pytest.raises(AdapterdError):
            missing.wait(30)
        gone = cache.acquire("acme/finance", tenant="acme").wait(30)
        gone.release()
        for lease, code in (
            (missing, Code.NOT_FOUND),
            (gone, Code.LEASE_RELEASED),
            (wide, Code.MODULE_NOT_SERVED),
        ):
            with pytest.raises(AdapterdError) as caught:
                engine.check(lease)
            assert caught.value.code is code
            assert cache.statistics().steps_in_flight == 0
        engine.check(ready)
        assert torch.isfinite(run_one(engine, model, ready)).all()
        ready.release()
        wide.release()
        missing.release()


def test_a_lease_of_another_cache_is_refused(publisher: FolderPublisher) -> None:
    """Its slot and generation may be those of an adapter here: rows would get that one, and no error."""
    publisher.publish("acme", "finance", modules=["q_proj"], seed=1)
    publisher.publish("globex", "finance", modules=["q_proj"], seed=2)
    model = toy()
    with cache_over(publisher) as cache, cache_over(publisher) as other, LoRAEngine(model, cache) as engine:
        mine = cache.acquire("globex/finance", tenant="globex").wait(30)
        theirs = other.acquire("acme/finance", tenant="acme").wait(30)
        base = other.acquire(None, tenant="acme")
        (a, _), (b, _) = mine.composition[0], theirs.composition[0]
        assert (a.slot, a.generation) == (b.slot, b.generation)
        for lease in (theirs, base):
            with pytest.raises(AdapterdError) as caught:
                run_one(engine, model, lease)
            assert caught.value.code is Code.SLOT_STALE
            assert cache.statistics().steps_in_flight == 0
        for lease in (mine, theirs, base):
            lease.release()


def test_a_base_reload_fails_the_old_leases(publisher: FolderPublisher) -> None:
    package = publisher.publish("acme", "finance", modules=LINEARS, rank=4, alpha=4, seed=1)
    old, new = toy(seed=3), toy(seed=4)
    moved = BaseSpec.of(publisher.base.modules, id=publisher.base.id, revision="c" * 40)
    with cache_over(publisher) as cache, LoRAEngine(old, cache) as engine:
        lease = cache.acquire("acme/finance", tenant="acme").wait(30)
        adapted = run_one(engine, old, lease)
        assert not torch.equal(adapted, old(torch.ones(1, HIDDEN)))
        engine.rebind(new, moved)
        with pytest.raises(AdapterdError) as caught:
            run_one(engine, new, lease)
        assert caught.value.code is Code.SLOT_STALE
        with pytest.raises(AdapterdError):  # the version was admitted for the old base
            cache.acquire("acme/finance", tenant="acme").wait(30)
        engine.rebind(new, publisher.base)
        with cache.acquire("acme/finance", tenant="acme").wait(30) as again:
            got = run_one(engine, new, again)
        wanted = merged(toy(seed=4), [(package, 1.0, 1.0)])(torch.ones(1, HIDDEN).double())
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-4)
        lease.release()


def test_eviction_and_return(publisher: FolderPublisher) -> None:
    """More adapters than pages: each comes, serves, goes and comes back with its own values."""
    options = {"modules": LINEARS, "rank": 4, "alpha": 4}
    packages = {f"a{i}": publisher.publish("acme", f"a{i}", seed=i, **options) for i in range(5)}
    model, plain = toy(), toy()
    x = torch.ones(1, HIDDEN)
    config = CacheConfig(vram_bytes=2 * MIB, host_bytes=8 * MIB)
    cache = AdapterCache(config, base=publisher.base, source=publisher.source, trust=publisher.trust)
    with cache, LoRAEngine(model, cache) as engine:
        for name in [*packages, *reversed(packages)]:
            with cache.acquire(f"acme/{name}", tenant="acme").wait(30) as lease:
                got = run_one(engine, model, lease)
            wanted = merged(plain, [(packages[name], 1.0, 1.0)])(x.double())
            torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-4)
