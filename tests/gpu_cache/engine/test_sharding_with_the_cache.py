"""Two ranks' caches over one publisher: each verifies the whole adapter and packs its part; their sum is the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapterd.gpu_cache import AdapterCache, CacheConfig
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.sharding import Sharding
from fakes.publisher import FolderPublisher

MIB = 1 << 20
WIDTH, INNER = 24, 40


class Pair(nn.Module):
    """down(tanh(up(x))), or a rank's share of it: a partial output, which nobody has summed."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def share(whole: Pair, rank: int) -> Pair:
    part = Pair(INNER // 2)
    with torch.no_grad():
        part.up.weight.copy_(whole.up.weight.chunk(2, dim=0)[rank])
        part.down.weight.copy_(whole.down.weight.chunk(2, dim=1)[rank])
    return part.eval().requires_grad_(False)


def pair_spec() -> BaseSpec:
    return BaseSpec.from_module(Pair(), id="tests/pair", revision="c" * 40)


def shards(rank: int) -> Sharding:
    return Sharding.of(rank, 2, column=["up"], row=["down"])


def cache_of(publisher: FolderPublisher, **settings: Any) -> AdapterCache:
    config = CacheConfig(vram_bytes=4 * MIB, host_bytes=4 * MIB, **settings)
    return AdapterCache(config, base=publisher.base, source=publisher.source, trust=publisher.trust)


@pytest.mark.parametrize("loader", ["thread", "process"])
def test_parts_that_two_caches_packed_sum_to_the_whole(tmp_path: Path, loader: str) -> None:
    publisher = FolderPublisher(tmp_path / "published", pair_spec())
    publisher.publish("acme", "finance", modules=["up", "down"], rank=5, alpha=10, seed=1)
    torch.manual_seed(2)
    whole, x = Pair().eval().requires_grad_(False), torch.randn(6, WIDTH)
    parts = [share(whole, rank) for rank in range(2)]
    plain, outputs, digests = whole(x), [], set()
    for sharding, model in [(Sharding(), whole), (shards(0), parts[0]), (shards(1), parts[1])]:
        with cache_of(publisher, loader=loader, sharding=sharding) as cache, LoRAEngine(model, cache) as engine:
            lease = cache.acquire("acme/finance", tenant="acme")
            lease.wait(30)
            digests.add(lease.composition[0][0].key.digest)
            with engine.step([(lease, 4), (None, 2)]):
                outputs.append(model(x))
    torch.testing.assert_close(outputs[1] + outputs[2], outputs[0], rtol=0, atol=1e-5)
    assert (outputs[0] - plain)[:4].abs().amax(dim=1).min() > 1e-2
    assert torch.equal((outputs[1] + outputs[2])[4:], (parts[0](x) + parts[1](x))[4:])
    assert len(digests) == 1, "what is verified and named is the whole adapter"


def test_a_sharding_that_does_not_fit_the_base_is_refused_when_the_cache_opens_or_is_rebound(tmp_path: Path) -> None:
    publisher = FolderPublisher(tmp_path / "published", pair_spec())
    with pytest.raises(AdapterdError) as refused:
        cache_of(publisher, sharding=Sharding.of(0, 16, column=["up"]))
    assert refused.value.code is Code.SETTINGS_INVALID and "40 features" in str(refused.value)
    other = BaseSpec.from_module(Pair(INNER + 1), id="tests/pair", revision="d" * 40)
    with cache_of(publisher, sharding=shards(0)) as cache:
        with pytest.raises(AdapterdError, match="41 features"):
            cache.rebind(other)
        assert cache.base == publisher.base


def test_a_model_of_another_rank_count_is_not_served(tmp_path: Path) -> None:
    publisher = FolderPublisher(tmp_path / "published", pair_spec())
    with cache_of(publisher, sharding=shards(0)) as cache, pytest.raises(AdapterdError) as refused:
        LoRAEngine(Pair(INNER // 4), cache)
    assert refused.value.code is Code.BASE_TABLE_INVALID
