"""The cells of the device's tables lead to the bytes that the layout has put there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adapterd.gpu_cache.cpu_device import CpuEvent
from adapterd.gpu_cache.engine.device_tables import DeviceTables
from adapterd.gpu_cache.engine.plan_ring import SLOTS, PlanRing
from adapterd.gpu_cache.table_shape import Matrix, TableShape
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.layout import Dtype
from fakes.static_cache import TORCH_DTYPES, StaticCache
from fakes.toy_models import toy_spec

CPU = torch.device("cpu")


def tables_for(base: BaseSpec, dtype: Dtype = "F32", *, max_rank: int = 64, slots: int = 64) -> DeviceTables:
    matrices = [Matrix(m.path, m.in_features, m.out_features) for m in base.modules]
    return DeviceTables(TableShape(matrices, slots, max_rank, dtype, 4096), CPU)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_cells_lead_to_the_factors(dtype: Dtype) -> None:
    base = toy_spec()
    cache, tables = StaticCache(base), tables_for(base, dtype)
    paths = [m.path for m in base.modules]
    cache.add(dict.fromkeys(paths, 3), seed=1, dtype=dtype)
    adapter = cache.add({path: 1 + 7 * i for i, path in enumerate(paths[:6])}, seed=2, dtype=dtype)
    resident, shape = adapter.resident, tables.shape
    assert tables.why_not(resident) == ""
    assert tables.missing(resident)
    row = np.full(shape.stride, 99, np.int64)
    tables.write(resident, row)
    assert tables.missing(resident), "its copy may fail yet"
    tables.written(resident)
    assert not tables.missing(resident)
    cells = row.reshape(3, len(paths), shape.entries)
    kept = TORCH_DTYPES[dtype]
    for index, path in enumerate(paths):
        factors = adapter.modules.get(path)
        if factors is None:
            assert not cells[:2, index].any()
            continue
        for side, matrix in ((0, factors.a), (1, factors.b.T)):
            rows = []
            for cell in cells[side, index].tolist():
                size = (cell & 255) * matrix.shape[1] * kept.itemsize
                begin = (cell >> 8) * 16
                rows.append(cache.arena[begin : begin + size].view(kept).view(-1, matrix.shape[1]))
            assert torch.equal(torch.cat(rows), matrix)
        assert cells[2, index].astype(np.uint32).view(np.float32) == pytest.approx(factors.scaling)
    assert tables.blocks_of(resident) == int((cells[:2] > 0).sum(axis=2).max())


def test_a_new_generation_is_missing_again() -> None:
    base = toy_spec()
    cache, tables = StaticCache(base), tables_for(base)
    old = cache.add({base.modules[0].path: 2}, seed=1)
    tables.written(old.resident)
    assert not tables.missing(old.resident)
    cache.evict(old)
    new = cache.add({base.modules[0].path: 2}, seed=1)
    assert new.resident.slot == old.resident.slot
    assert tables.missing(new.resident)


def test_why_not() -> None:
    base = toy_spec()
    cache, tables = StaticCache(base), tables_for(base, max_rank=16, slots=2)
    path = base.modules[0].path
    assert tables.why_not(cache.add({path: 16}, seed=1).resident) == ""
    assert "blocks" in tables.why_not(cache.add({path: 400}, seed=1).resident)
    assert "outside" in tables.why_not(cache.add({path: 1}, seed=1).resident)
    assert "BF16" in tables.why_not(cache.add({path: 1}, seed=1, dtype="BF16").resident)


def test_a_full_ring_is_an_error_and_no_wait() -> None:
    ring = PlanRing(8, 1, 4, pinned=False)
    marks = [CpuEvent() for _ in range(SLOTS)]
    for mark in marks:
        ring.take().sent = mark
    with pytest.raises(AdapterdError) as caught:
        ring.take()
    assert caught.value.code is Code.PLAN_RING_FULL
    marks[0].set()
    assert ring.take().sent is None
    with pytest.raises(AdapterdError):
        ring.take()
