"""Compilers in processes of their own: for a card that is not here, into a folder that the caller finds it in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

from adapterd.gpu_cache.engine.device_plan import Regime
from adapterd.gpu_cache.engine.tuning.cases import Case
from adapterd.gpu_cache.engine.tuning.compiling import Job, compilers, jobs_of
from adapterd.gpu_cache.engine.tuning.workloads import LLAMA_8B, Workload

CASE = Case(Workload(LLAMA_8B[0], 2048, "requests", 16), Regime.TILES)


def test_kernels_are_compiled_once_and_found_again(tmp_path: Path) -> None:
    shrink, expand = jobs_of(CASE.launch(CASE.by_rule(), pdl=True, shared_memory=227 << 10), CASE.regime)
    bad = Job(shrink.kernel, {**shrink.constants, "BLOCK_K": 48})
    before = os.environ.get("TRITON_CACHE_DIR")
    with compilers(90, tmp_path, processes=1) as pool:
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
        pool.submit([shrink, expand, shrink, bad])
        assert pool.count == 3
        found = [pool.result(job) for job in (shrink, expand)]
        assert all(16 << 10 < one.shared_memory < 227 << 10 and not one.fault for one in found)
        assert "power of 2" in pool.result(bad).fault
    assert os.environ.get("TRITON_CACHE_DIR") == before
    cubins = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert len(cubins) == 2
    with compilers(90, tmp_path, processes=1) as pool:
        assert [pool.result(job) for job in (shrink, expand)] == found
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")} == cubins
