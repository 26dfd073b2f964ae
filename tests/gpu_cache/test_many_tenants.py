"""No book keeps the name of everybody who ever came: a worker lives long, and tenants come and go."""

from __future__ import annotations

from adapterd.gpu_cache.host.pool import FairPool
from contracts.host_user import SECONDS
from fakes.cache_world import World


def test_the_books_kept_the_name_of_every_tenant_that_ever_came() -> None:
    with World(vram=2, host=2) as world:
        for index in range(20):
            version = world.loader.publish(f"t{index}/a")
            world.ready(version.pinned).release()
            world.failure(f"t{index}/unknown")
            world.failure("acme/a", f"t{index}")
        cache, host = world.cache, world.cache._host
        assert len(cache._vram.budget.used) == len(cache._vram.slot_shares.used) == 2
        assert len(host._tier.budget.used) == 2  # type: ignore[attr-defined]
        assert not cache._stager._queued  # a name with a count of nothing would be one, too
        assert not host._answers.waiting  # type: ignore[attr-defined]


def test_a_pool_kept_the_name_of_every_tenant_that_ever_ran() -> None:
    pool = FairPool(2, {}, None)
    for index in range(20):
        pool.submit(f"t{index}", lambda: None)
    while pool._queues:
        pass
    pool.close(SECONDS)
    assert pool._running == {}
