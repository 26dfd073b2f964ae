"""The kernels behind quantised linears: those of torch itself, in whatever dtype their outputs are."""

from __future__ import annotations

import pytest

from fakes.quantised_layers import TORCH
from fakes.served_layer import check_quantised


@pytest.mark.parametrize("name", TORCH)
def test_kernels_add_to_what_a_quantised_linear_gives(name: str) -> None:
    assert check_quantised(TORCH[name], "triton").startswith("triton:")
