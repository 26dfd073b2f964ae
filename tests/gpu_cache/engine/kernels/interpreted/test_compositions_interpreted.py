"""What the benchmark of compositions compares: a row of k weighted adapters gives their sum, by float64."""

from __future__ import annotations

import pytest
from benchmarks.compositions import float64_of

from adapterd.gpu_cache.engine.tuning.stand import agrees
from adapterd.gpu_cache.engine.tuning.workloads import Owners, Widths, Workload
from adapterd.gpu_cache.engine.tuning.world import World

SMALL = Widths("small", 256, (64, 32))


@pytest.mark.parametrize("owners", ["distinct", "one"])
def test_a_world_of_compositions_gives_the_sum_of_float64(owners: Owners) -> None:
    composed = World(Workload(SMALL, 5, owners, 16, 3), "cpu", sets=2)
    residents = {resident.slot for lease, _ in composed.rows for resident, _ in lease.composition}
    assert len(residents) == (15 if owners == "distinct" else 3)
    wanted, got = float64_of(composed), composed.once(kernels="triton", strict=True).double()
    assert agrees(got, wanted)
    first = composed.rows[0][0].composition[1][0]
    composed.cache.arena[first.pages[0] * composed.cache.config.page_bytes :][:4096] = 0  # an adapter in the middle
    assert not agrees(got, float64_of(composed))
