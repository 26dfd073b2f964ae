"""Tuning on the device: what compilers elsewhere leave is found here, and a search writes what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fakes.commands import Commands

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = "cuda:0"
SMALL = ["--linear", "2048:512,256", "--rank", "16"]


@pytest.mark.parametrize("rows", [64, 2048])
def test_what_was_compiled_elsewhere_is_found_here(rows: int, tmp_path: Path) -> None:
    from adapterd.gpu_cache.engine.kernels.launch import shared_memory_of
    from adapterd.gpu_cache.engine.tuning.cases import cases
    from adapterd.gpu_cache.engine.tuning.compiling import compilers, jobs_of
    from adapterd.gpu_cache.engine.tuning.machine import machine_at
    from adapterd.gpu_cache.engine.tuning.stand import Stand
    from adapterd.gpu_cache.engine.tuning.workloads import Widths

    machine = machine_at(CUDA)
    (case,) = cases([Widths("w", 1536, (320,))], [rows], [16])
    launch = case.launch(case.by_rule(), pdl=machine.pdl, shared_memory=shared_memory_of(torch.device(CUDA)))
    with compilers(machine.target, tmp_path, processes=1) as pool:
        assert not any(pool.result(job).fault for job in jobs_of(launch, case.regime))
        before = sorted(tmp_path.rglob("*.cubin"))
        stand = Stand(case, CUDA, pdl=machine.pdl)
        stand.use(case.by_rule())
        assert stand.right()
        assert stand.time() > 0
        assert sorted(tmp_path.rglob("*.cubin")) == before
    assert len(before) == 2


def test_a_search_and_a_bench_from_the_shell(tmp_path: Path) -> None:
    shell = Commands(tmp_path)
    out = tmp_path / "table.json"
    words = ["bench", "kernels", *SMALL, "--rows", "64", "--rows", "1024"]
    body = shell.json(*words, "--tune", "--out", out, "--minutes", "1.5")
    assert body["tally"]["timed"] > 10
    assert body["tally"]["wrong"] == 0
    assert json.loads(out.read_text())["entries"] == body["entries"]
    rows = shell.json(*words, "--tuning", out, "--batch-invariant")["rows"]
    assert {row["mode"] for row in rows} == {"default", "batch-invariant"}
    assert all(row["us"] > 0 and row["error"] < 5e-3 and row["config"]["split"] for row in rows)
