"""The math against float64 products in numpy, and the process-wide settings it must not leave behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from adapterd.gpu_cache.engine.reference import Term, accumulate_dtype, delta, ieee_matmul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def blocks(matrix: torch.Tensor, heights: list[int]) -> tuple[torch.Tensor, ...]:
    return tuple(matrix.split(heights))


def wanted(x: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor, float]]) -> np.ndarray:
    total = 0
    for a, b, factor in parts:
        merged = factor * b.double().numpy().T @ a.double().numpy()
        total = total + x.double().numpy() @ merged.T
    return total


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "out", "heights"), [
    (1, 1, 1, [1]), (3, 7, 5, [2]), (16, 33, 65, [8, 4, 1]), (17, 129, 31, [16, 16]), (50, 64, 64, [1, 1, 1]),
])  # fmt: skip
def test_delta_is_the_float64_product(
    rows: int, width: int, out: int, heights: list[int], dtype: torch.dtype, batch_invariant: bool
) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, width)
    parts = []
    for factor in (2.0, -0.25):
        a, b = torch.randn(sum(heights), width).to(dtype), torch.randn(sum(heights), out).to(dtype)
        parts.append((a, b, factor))
    terms = [Term(blocks(a, heights), blocks(b, heights[::-1]), f) for a, b, f in parts]
    got = delta(x, terms, dtype=torch.float32, batch_invariant=batch_invariant)
    assert got.dtype == torch.float32
    truth = wanted(x, parts)
    np.testing.assert_allclose(got.numpy(), truth, rtol=0, atol=2e-6 * max(1.0, np.abs(truth).max()))


def test_float64_layers_accumulate_in_float64() -> None:
    assert accumulate_dtype(torch.float64) == torch.float64
    assert {accumulate_dtype(d) for d in DTYPES} == {torch.float32}
    torch.manual_seed(1)
    x, a, b = torch.randn(9, 40).double(), torch.randn(4, 40), torch.randn(4, 20)
    got = delta(x, [Term((a,), (b,), 3.0)], dtype=torch.float64, batch_invariant=False)
    np.testing.assert_allclose(got.numpy(), wanted(x, [(a, b, 3.0)]), rtol=1e-13, atol=1e-13)


def test_autocast_does_not_reach_the_delta() -> None:
    torch.manual_seed(2)
    x, a, b = torch.randn(5, 64), torch.randn(8, 64), torch.randn(8, 32)
    plain = delta(x, [Term((a,), (b,), 1.0)], dtype=torch.float32, batch_invariant=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ a.T).dtype == torch.bfloat16
        inside = delta(x, [Term((a,), (b,), 1.0)], dtype=torch.float32, batch_invariant=False)
    assert torch.equal(plain, inside)


def precision() -> tuple[str, str]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


@pytest.fixture
def _precision_restored():
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_precision_restored")
@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_process_gets_its_precision_back(setting: str) -> None:
    torch.set_float32_matmul_precision(setting)
    before = precision()
    with ieee_matmul("cpu"):
        assert precision() == ("ieee", "ieee")
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == setting
    assert precision() == before


@pytest.mark.usefixtures("_precision_restored")
def test_the_new_interface_gets_its_precision_back() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    before = precision()
    with pytest.raises(RuntimeError, match="boom"), ieee_matmul("cpu"):
        assert precision() == ("ieee", "ieee")
        raise RuntimeError("boom")
    assert precision() == before


@pytest.mark.usefixtures("_precision_restored")
def test_the_last_of_two_threads_restores() -> None:
    """The first one out must not switch TF32 on under the other one."""
    torch.set_float32_matmul_precision("high")
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with ieee_matmul("cpu"):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with ieee_matmul("cpu"):
        thread.start()
        assert entered.wait(10)
    assert precision() == ("ieee", "ieee")
    leave.set()
    thread.join(10)
    assert torch.get_float32_matmul_precision() == "high"
