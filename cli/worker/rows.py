"""What a step will run, laid out in numbers: before the device is asked for anything."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from adapterd.cli.worker.kv import BLOCK_TOKENS, NOBODY, KeyValues, Slots

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of a step that is run by lookup table, and by captured graph where there are any."""
FIRST_BLOCKS = 16
"""Blocks a row may look up: this many, twice as many, and so on."""
TABLE_ENTRIES = 8192
"""Rows × blocks of a table. Looking up copies 16 tokens' keys and values an entry, a layer."""

Rows = tuple[Sequence[int], KeyValues]
"""The next token ids of one sequence, and what it has."""


class Bucket(NamedTuple):
    """Sizes that a step is padded to."""

    rows: int
    blocks: int


def bucket_of(rows: int, blocks: int, most_rows: int) -> Bucket | None:
    """The smallest that holds so many rows and blocks a row; None if a table of that size would cost too much."""
    if not 0 < rows <= min(most_rows, ROW_BUCKETS[-1]):
        return None
    padded = ROW_BUCKETS[bisect_left(ROW_BUCKETS, rows)]
    width = max(FIRST_BLOCKS, 1 << (blocks - 1).bit_length())
    return Bucket(padded, width) if padded * width <= TABLE_ENTRIES else None


@dataclass(frozen=True)
class StepRows:
    """The rows of one step, in order. Every sequence has blocks for its rows.

    Attributes:
        sequences: see `Rows`; each with one row at least.
        bucket: what the step is padded to, to be run by lookup table as a whole; None: neither is done.
    """

    sequences: Sequence[Rows]
    bucket: Bucket | None

    @staticmethod
    def of(sequences: Sequence[Rows], most_rows: int) -> StepRows:
        """Args: most_rows: of a step that is run by lookup table. Raises Unavailable: BUDGET_EXCEEDED."""
        blocks = 1
        for tokens, kv in sequences:
            kv.reserve(len(tokens))
            blocks = max(blocks, len(kv.blocks))
        return StepRows(sequences, bucket_of(sum(len(tokens) for tokens, _ in sequences), blocks, most_rows))

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each sequence."""
        return [len(tokens) for tokens, _ in self.sequences]

    @cached_property
    def ids(self) -> list[int]:
        return [token for tokens, _ in self.sequences for token in tokens]

    @property
    def padding(self) -> int:
        """Rows of the base that stand behind the others."""
        return 0 if self.bucket is None else self.bucket.rows - len(self.ids)

    @cached_property
    def last(self) -> Slots:
        """Each sequence's last row."""
        return np.cumsum(self.counts) - 1

    @cached_property
    def positions(self) -> Slots:
        """Of each row in its sequence."""
        lengths = np.array([kv.length for _, kv in self.sequences])
        if len(self.ids) == len(lengths):
            return lengths
        first = np.repeat(self.last + 1 - self.counts, self.counts)
        return np.repeat(lengths, self.counts) + np.arange(len(self.ids)) - first

    @cached_property
    def write(self) -> Slots:
        """Where in the pool each row's keys and values go."""
        index = self.positions // BLOCK_TOKENS
        rows = zip(self.owners, index.tolist(), strict=True)
        blocks = np.array([self.sequences[owner][1].blocks[at] for owner, at in rows])
        return blocks * BLOCK_TOKENS + self.positions % BLOCK_TOKENS

    @cached_property
    def owners(self) -> list[int]:
        """The sequence of each row."""
        return [owner for owner, count in enumerate(self.counts) for _ in range(count)]

    def fill_table(self, table: Slots, owners: Sequence[int]) -> None:
        """The blocks of these sequences, one a row, into `table` [at least as many rows, at least as many blocks]."""
        table[:] = NOBODY
        for row, owner in enumerate(owners):
            blocks = self.sequences[owner][1].blocks
            table[row, : len(blocks)] = blocks
