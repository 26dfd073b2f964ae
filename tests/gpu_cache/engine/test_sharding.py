"""Tensor parallelism on CPU with gloo: TP=N gives what TP=1 gives, with the base's collectives and no other (I21)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from fakes.parallel_models import save_llama
from fakes.parallel_runs import OWNERS, local_network, torch_plan, transformers_plan
from fakes.ranks import run_ranks

ATOL = 2e-5
"""Of fp32 outputs of size 1 to 5: shards sum in another order."""
CASES = ("plain", "fused", "inside", "fused inside", "torch", "transformers")
REDUCTIONS = 4  # of two layers
Found = list[dict[str, dict[str, Any]]]


def every_case(rank: int, size: int, device: str, *, folder: str) -> dict[str, dict[str, Any]]:
    """In one start of the processes. Four ranks share the two key heads, which plans of torch cannot."""
    found = {
        "plain": local_network(rank, size, device),
        "fused": local_network(rank, size, device, fused=True),
        "inside": local_network(rank, size, device, inside=True),
        "fused inside": local_network(rank, size, device, fused=True, inside=True),
    }
    if size == 2:
        found["torch"] = torch_plan(rank, size, device)
        found["transformers"] = transformers_plan(rank, size, device, folder=folder)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[int, Found]]:
    folder = tmp_path_factory.mktemp("ranks")
    save_llama(folder / "llama")
    found = {}
    for size in (2, 4):
        (folder / str(size)).mkdir()
        work = partial(every_case, folder=str(folder / "llama"))
        found[size] = run_ranks(work, size, folder / str(size))
    return found


def each(case: str, runs: Mapping[int, Found]) -> Iterator[dict[str, Any]]:
    found = [ranks[case] for size in runs for ranks in runs[size] if case in ranks]
    assert len(found) >= 2
    return iter(found)


@pytest.mark.parametrize("case", CASES)
def test_n_ranks_give_what_one_gives(runs: Mapping[int, Found], case: str) -> None:
    adapted = [row for row, owner in enumerate(OWNERS) if owner >= 0]
    for run in each(case, runs):
        torch.testing.assert_close(run["got"], run["wanted"], rtol=0, atol=ATOL)
        apart = (run["wanted"] - run["plain"])[adapted].flatten(1).abs().amax(dim=1)
        assert apart.min() > 100 * ATOL, "the adapters of a row cannot be told from none"
        assert run["not_run"] == ()


@pytest.mark.parametrize("case", CASES)
def test_base_rows_keep_their_bits_and_steps_repeat(runs: Mapping[int, Found], case: str) -> None:
    for run in each(case, runs):
        of_base = [row for row, owner in enumerate(OWNERS) if owner < 0]
        assert torch.equal(run["got"][of_base], run["base"][of_base])
        assert torch.equal(run["got"], run["again"])
        assert torch.equal(run["restored"], run["base"]), "a closed engine leaves the model as it was"


@pytest.mark.parametrize("case", ["plain", "fused", "torch", "transformers"])
def test_one_reduction_is_shared_with_the_bases(runs: Mapping[int, Found], case: str) -> None:
    for run in each(case, runs):
        assert run["sent"] == run["sent_by_base"] >= REDUCTIONS
        assert not any("reduces its output itself" in reason for reason in run["reasons"])


@pytest.mark.parametrize("case", ["inside", "fused inside"])
def test_a_layer_that_hides_its_partial_output_costs_one_more_and_the_receipt_says_so(
    runs: Mapping[int, Found], case: str
) -> None:
    for run in each(case, runs):
        assert run["sent_by_base"] == REDUCTIONS
        assert run["sent"] == 2 * REDUCTIONS
        assert any("reduces its output itself" in reason for reason in run["reasons"])
