"""Row-parallel layers that reduce inside of their own forward: the engine sums its rank-r intermediate itself (I21).

    y_ro += Σ_t (Σ_ranks factor_t · x_ri A_kiᵀ) B_ko         x, A: this rank's inputs; B whole

One collective a layer and step, of Σ rank values a row, beside the base's own of out_features a row. All ranks
run the same step, so all come here, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adapterd.gpu_cache.engine.reference import Term, accumulate_dtype, expand, shrink

Reduce = Callable[[Tensor], object]
"""Sums a tensor over the ranks, in place, in stream order; `torch.distributed.all_reduce` is one."""
REASON = "a layer that reduces its output itself: the engine sums its own intermediate over the ranks"


class Part(NamedTuple):
    """One segment in one module: rows, columns of the output, and what is added there."""

    rows: slice
    columns: slice
    terms: Sequence[Term]


def add_reduced(parts: Sequence[Part], reduce: Reduce, x_ri: Tensor, y_ro: Tensor, *, batch_invariant: bool) -> None:
    """y += the deltas of all parts, whose sums over the ranks are made at once."""
    if not parts:
        return
    dtype = accumulate_dtype(y_ro.dtype)
    mine = [shrink(x_ri[p.rows], p.terms, dtype=dtype, batch_invariant=batch_invariant) for p in parts]
    flat = torch.cat([h_rk.reshape(-1) for hs in mine for h_rk in hs])
    reduce(flat)
    summed = iter(torch.split(flat, [h_rk.numel() for hs in mine for h_rk in hs]))
    for part, hs in zip(parts, mine, strict=True):
        whole = [next(summed).view(h_rk.shape) for h_rk in hs]
        y_ro[part.rows, part.columns] += expand(whole, part.terms, dtype=dtype, batch_invariant=batch_invariant)
