"""What is timed: one linear, so many rows, whose adapters they have and of which ranks; and its fewest bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MIXED = (8, 16, 32, 64)
"""Ranks of a workload of mixed ranks, in turn."""
ITEM_BYTES = 2
"""Of x, y and the adapters: bf16."""
REQUESTS = 8
ZIPF_ADAPTERS = 256
ZIPF_EXPONENT = 1.1

Owners = Literal["distinct", "zipf", "one", "requests"]
"""Each row has an adapter of its own; drawn from 256 by Zipf's law; the same; or 8 adapters with a run of rows each."""


@dataclass(frozen=True, slots=True)
class Widths:
    """One live linear: `parts` are the widths of the modules that it holds, in order."""

    name: str
    in_features: int
    parts: tuple[int, ...]

    @property
    def out_features(self) -> int:
        return sum(self.parts)


LLAMA_8B = (
    Widths("q", 4096, (4096,)),
    Widths("qkv", 4096, (4096, 1024, 1024)),
    Widths("gate_up", 4096, (14336, 14336)),
    Widths("down", 14336, (4096,)),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """`rank` 0 is `MIXED`. `adapters`: of a row's composition, each of them of that rank."""

    linear: Widths
    rows: int
    owners: Owners
    rank: int
    adapters: int = 1

    @property
    def name(self) -> str:
        times = f"{self.adapters}×" if self.adapters > 1 else ""
        return f"{self.linear.name} T{self.rows} {self.owners} {times}r{self.rank or 'mixed'}"

    def rows_of(self) -> list[int]:
        """The adapter of each row, or its composition; the same whenever it is asked."""
        draw = random.Random(self.name)  # noqa: S311 - a workload, no secret
        if self.owners == "distinct":
            return draw.sample(range(self.rows), self.rows)
        if self.owners == "one":
            return [0] * self.rows
        if self.owners == "requests":
            return [index * REQUESTS // self.rows for index in range(self.rows)]
        weights = [1.0 / (i + 1) ** ZIPF_EXPONENT for i in range(ZIPF_ADAPTERS)]
        drawn = draw.choices(range(ZIPF_ADAPTERS), weights, k=self.rows)
        known = {adapter: index for index, adapter in enumerate(sorted(set(drawn)))}
        return [known[adapter] for adapter in drawn]

    def rank_of(self, adapter: int) -> int:
        """Of each adapter, where it is a composition."""
        return self.rank or MIXED[adapter % len(MIXED)]

    @property
    def most_rank(self) -> int:
        return self.rank or max(MIXED)

    def nbytes(self) -> int:
        """The fewest of one layer: x, A and B of each adapter once, y read and written."""
        k, n = self.linear.in_features, self.linear.out_features
        ranks = self.adapters * sum(self.rank_of(adapter) for adapter in set(self.rows_of()))
        return ITEM_BYTES * (self.rows * k + ranks * (k * len(self.linear.parts) + n) + 2 * self.rows * n)


DECODE_ROWS, PREFILL_ROWS = (64, 256), (2048, 8192)
RANKS = (16, 64, 0)
LEAST_PREFILL = 512
"""Rows from which on a workload is a prefill: few requests with many rows each."""


def workloads(
    linears: Sequence[Widths] = LLAMA_8B,
    rows: Sequence[int] = (*DECODE_ROWS, *PREFILL_ROWS),
    ranks: Sequence[int] = RANKS,
) -> list[Workload]:
    """What `adapterctl bench kernels` times: decoding with distinct adapters and under Zipf, prefills of 8 requests."""
    kinds: list[tuple[int, Owners]] = []
    for count in rows:
        kinds += [(count, "requests")] if count >= LEAST_PREFILL else [(count, "distinct"), (count, "zipf")]
    return [Workload(linear, count, owners, rank) for linear in linears for count, owners in kinds for rank in ranks]
