"""Batches for the engine's tests: which row gets which adapter, on the toy of `toy_models`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adapterd.loader.layout import Dtype
from fakes.merged import Composition
from fakes.static_cache import Adapter, StaticCache, StaticLease
from fakes.toy_models import LINEARS

ROWS = 24
DISTRIBUTIONS: Mapping[str, Sequence[int]] = {  # row → adapter, -1 the base; the parameter of punica's tests
    "identical": [0] * ROWS,
    "distinct": list(range(ROWS)),
    "uniform": [i % 4 for i in range(ROWS)],
    "zipf": [0] * 12 + [1] * 6 + [2] * 3 + [3] * 2 + [4],
    "skewed": [0] * (ROWS - 2) + [1, -1],
    "with base": [-1, 0, 0, -1, 1, 2, -1, -1] * 3,
    "base only": [-1] * ROWS,
}


def adapters_of(cache: StaticCache, count: int, dtype: Dtype = "F32") -> list[Adapter]:
    """Of different ranks; every third one leaves half of the modules alone."""
    return [
        cache.add(dict.fromkeys(LINEARS[:: 2 if i % 3 == 2 else 1], 1 + (7 * i) % 20), seed=i, dtype=dtype)
        for i in range(count)
    ]


def batch(
    cache: StaticCache, adapters: Sequence[Adapter], owners: Sequence[int]
) -> list[tuple[StaticLease | None, int]]:
    """The entries of a step, a row each."""
    return [(cache.lease(adapters[o]) if o >= 0 else None, 1) for o in owners]


def compositions(adapters: Sequence[Adapter], owners: Sequence[int]) -> list[Composition]:
    """The same for the oracle."""
    return [[(adapters[o], 1.0)] if o >= 0 else [] for o in owners]
