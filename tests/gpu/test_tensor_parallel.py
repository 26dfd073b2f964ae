"""Tensor parallelism on two cards with NCCL: the assertions of `tests/gpu_cache/engine/test_sharding.py` (I21)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.parallel_models import save_llama
from fakes.parallel_runs import OWNERS, local_network, torch_plan, transformers_plan
from fakes.ranks import run_ranks

SIZE = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason="needs two CUDA devices"),
]
ULPS = {torch.float32: 64, torch.bfloat16: 4}
"""Tolerance in units of eps(dtype) × the largest output: a partial output is rounded on every rank, then summed."""
DTYPES = pytest.mark.parametrize("dtype", list(ULPS), ids=["fp32", "bf16"])
DTENSOR_PLANS = find_spec("transformers.distributed.tensor_parallel") is not None
CASES = ("plain", "fused", "inside", "torch", *(["transformers"] if DTENSOR_PLANS else []))
"""Plans of transformers before these kept plain local weights, which do not say how they are cut."""
Key = tuple[torch.dtype, str]


def every_case(rank: int, size: int, device: str, *, folder: str) -> dict[Key, dict[str, Any]]:
    """In one start of the processes."""
    found: dict[Key, dict[str, Any]] = {}
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    for dtype in ULPS:
        found[dtype, "plain"] = local_network(rank, size, device, dtype)
        found[dtype, "fused"] = local_network(rank, size, device, dtype, fused=True)
        found[dtype, "inside"] = local_network(rank, size, device, dtype, inside=True)
        found[dtype, "torch"] = torch_plan(rank, size, device, dtype)
        if DTENSOR_PLANS:
            found[dtype, "transformers"] = transformers_plan(rank, size, device, dtype, folder=folder)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Mapping[Key, dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("ranks")
    save_llama(folder / "llama")
    (folder / "run").mkdir()
    yield run_ranks(partial(every_case, folder=str(folder / "llama")), SIZE, Path(folder / "run"), backend="nccl")


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_two_cards_give_what_one_gives(runs: list[Mapping[Key, dict[str, Any]]], case: str, dtype: torch.dtype) -> None:
    adapted = [row for row, owner in enumerate(OWNERS) if owner >= 0]
    for rank in runs:
        run = rank[dtype, case]
        wanted = run["wanted"].double()
        atol = ULPS[dtype] * torch.finfo(dtype).eps * float(wanted.abs().max())
        torch.testing.assert_close(run["got"].double(), wanted, rtol=0, atol=atol)
        assert (wanted - run["plain"].double())[adapted].flatten(1).abs().amax(dim=1).min() > 2 * atol
        assert run["not_run"] == ()


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_base_rows_keep_their_bits_and_steps_repeat(
    runs: list[Mapping[Key, dict[str, Any]]], case: str, dtype: torch.dtype
) -> None:
    of_base = [row for row, owner in enumerate(OWNERS) if owner < 0]
    for rank in runs:
        run = rank[dtype, case]
        assert torch.equal(run["got"][of_base], run["base"][of_base])
        assert torch.equal(run["got"], run["again"])
        assert torch.equal(run["restored"], run["base"])


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_one_reduction_is_shared_with_the_bases(
    runs: list[Mapping[Key, dict[str, Any]]], case: str, dtype: torch.dtype
) -> None:
    for rank in runs:
        run = rank[dtype, case]
        own = 4 if case == "inside" else 0
        assert run["sent"] == run["sent_by_base"] + own
        assert run["sent_by_base"] >= 4
        assert run["kernel"].startswith("triton")
        assert any("reduces its output itself" in reason for reason in run["reasons"]) == bool(own)
