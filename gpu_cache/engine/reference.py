"""The delta of one linear for one segment: the only place with the math, on CPU and CUDA alike.

    y_ro += Σ_t (factor_t · x_ri A_kiᵀ) B_ko          factor = scaling · weight, applied once, to h (I5)

with A [rank, in] and B stored transposed, [rank, out], both cut into rank blocks. (LoRA, Hu et al.
2021, §4.1: h = W₀x + BAx, scaled by α/r; the scaling is a stored fact of the version.)

Legend: r rows of a segment, i in_features, o out_features, k rank.

fp32 means IEEE fp32 (I18): products run outside autocast and with TF32 and bf16 shortcuts off, whatever
the process has set for its base model. No atomics, fixed order: the same step gives the same bits again.

Batch invariance costs something. A BLAS picks its algorithm by shape, and a row's bits then depend on
how many rows are multiplied with it. Measured: on CPU (MKL, AVX2) most rows change when fewer than 16 are
multiplied, and with two threads in batched products, too; on an H200 (torch 2.11, cuBLAS of CUDA 13) all
rows of a [n, 4096] × [4096, 64] product for nearly every n. Multiplying `TILE_ROWS` rows at a time, the
last tile filled with zeros, gives every product the same shape, and the bits held for every split tried
on both (tests/gpu_cache/engine/test_batch_invariance.py, tests/gpu/test_engine_cuda.py). It takes about
ten times as long for large segments, so it is a mode and not the default.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

KERNEL = "reference:torch"
TILE_ROWS = 16
"""Rows of a product in batch-invariant mode; a tile of every BLAS, and whole 64-byte lines at any width."""


@dataclass(frozen=True, slots=True)
class Term:
    """What one version adds: A blocks [rows, in], B blocks [rows, out], and scaling · weight."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    factor: float


def accumulate_dtype(output: torch.dtype) -> torch.dtype:
    """fp64 for layers that give fp64, else fp32."""
    return torch.float64 if output == torch.float64 else torch.float32


def delta(x_ri: Tensor, terms: Sequence[Term], *, dtype: torch.dtype, batch_invariant: bool) -> Tensor:
    """The sum of all terms for rows x, [r, o] in `dtype`; `terms` is not empty.

    Args:
        x_ri: the layer's input for one segment, any floating dtype.
        terms: in the composition's order, which is the order of summation.
        dtype: of every product and sum, from `accumulate_dtype`.
        batch_invariant: multiply `TILE_ROWS` rows at a time.
    """
    hs = shrink(x_ri, terms, dtype=dtype, batch_invariant=batch_invariant)
    return expand(hs, terms, dtype=dtype, batch_invariant=batch_invariant)


def shrink(x_ri: Tensor, terms: Sequence[Term], *, dtype: torch.dtype, batch_invariant: bool) -> list[Tensor]:
    """factor · x Aᵀ of every term, [r, k] in `dtype`; arguments as of `delta`."""
    product = _tiled if batch_invariant else torch.matmul
    with ieee_matmul(x_ri.device.type):
        x_ri = x_ri.to(dtype)
        return [torch.cat([product(x_ri, a_ki.to(dtype).T) for a_ki in t.a], dim=1) * t.factor for t in terms]


def expand(hs: Sequence[Tensor], terms: Sequence[Term], *, dtype: torch.dtype, batch_invariant: bool) -> Tensor:
    """Σ h B over the terms, [r, o] in `dtype`; `hs` as `shrink` gives them."""
    product = _tiled if batch_invariant else torch.matmul
    with ieee_matmul(hs[0].device.type):
        total_ro = hs[0].new_zeros(hs[0].shape[0], terms[0].b[0].shape[1])
        for h_rk, term in zip(hs, terms, strict=True):
            done = 0
            for b_ko in term.b:
                part_rk = h_rk[:, done : done + b_ko.shape[0]]
                total_ro = total_ro + product(part_rk, b_ko.to(dtype))
                done += b_ko.shape[0]
        return total_ro


def _tiled(x_rm: Tensor, w_mn: Tensor) -> Tensor:
    """x @ w, `TILE_ROWS` rows at a time, each tile in memory of its own: equal shapes, equal alignment."""
    tiles = []
    for start in range(0, x_rm.shape[0], TILE_ROWS):
        part_rm = x_rm[start : start + TILE_ROWS]
        tile_rm = x_rm.new_zeros(TILE_ROWS, x_rm.shape[1])
        tile_rm[: part_rm.shape[0]] = part_rm
        tiles.append(tile_rm @ w_mn)
    return torch.cat(tiles)[: x_rm.shape[0]]


_precision_lock = threading.Lock()
_precision_users = 0
_precision_saved: tuple[str | None, str, str] = (None, "none", "none")


@contextmanager
def ieee_matmul(device_type: str) -> Iterator[None]:
    """Inside, fp32 products are IEEE fp32 and autocast is off.

    The setting belongs to the process, so the first one in saves it and the last one out restores it:
    with two engines in two threads neither runs in TF32 by the other's leaving. A base model in a third
    thread may meanwhile run a product more exactly than it asked for.
    """
    global _precision_users, _precision_saved  # noqa: PLW0603 - torch's own setting is global
    with _precision_lock:
        if _precision_users == 0:
            _precision_saved = _read_precision()
            torch.set_float32_matmul_precision("highest")
        _precision_users += 1
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        with _precision_lock:
            _precision_users -= 1
            if _precision_users == 0:
                _restore_precision(*_precision_saved)


def _read_precision() -> tuple[str | None, str, str]:
    """(old interface, new one for CUDA, new one for CPU); once both were used, the old getter may raise."""
    cuda = torch.backends.cuda.matmul.fp32_precision
    cpu: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    try:
        return torch.get_float32_matmul_precision(), cuda, cpu
    except RuntimeError:
        return None, cuda, cpu


def _restore_precision(legacy: str | None, cuda: str, cpu: str) -> None:
    if legacy is not None:
        torch.set_float32_matmul_precision(legacy)
    torch.backends.cuda.matmul.fp32_precision = cuda
    torch.backends.mkldnn.matmul.fp32_precision = cpu  # type: ignore[attr-defined]
