"""What a step will run, laid out in numbers: before the device is asked for anything."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adapterd.cli.worker.kv import BLOCK_TOKENS, KeyValues, Slots

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


def lasts_of(bucket: Bucket, sequences: int) -> int:
    """How many sequences a step of this bucket says something of, padding included: all its rows, or half of them.

    A step with a prompt has as many rows of it as of all others. Every size more is a graph more.
    """
    return bucket.rows if 2 * sequences > bucket.rows else bucket.rows // 2


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, in order. Every sequence has blocks for its rows.

    Attributes:
        sequences: see `Rows`; each with one row at least.
        bucket: what the step is padded to, to be run by lookup table as a whole; None: neither is done.
        ids: of all rows.
        counts: rows of each sequence. last: its last one.
        owners: the sequence of each row. positions: of the row in it.
        table: the blocks of each row's sequence; at least one, and any behind its own.
    """

    sequences: Sequence[Rows]
    bucket: Bucket | None
    ids: list[int]
    counts: Slots
    last: Slots
    owners: Slots
    positions: Slots
    table: Slots

    @staticmethod
    def of(sequences: Sequence[Rows], most_rows: int) -> StepRows:
        """Args: most_rows: of a step that is run by lookup table."""
        ids = [token for tokens, _ in sequences for token in tokens]
        counts = np.array([len(tokens) for tokens, _ in sequences])
        lengths = np.array([kv.length for _, kv in sequences])
        last, owners, positions = counts.cumsum() - 1, np.arange(len(counts)), lengths
        if len(ids) > len(counts):
            owners = owners.repeat(counts)
            positions = (lengths + counts - 1 - last)[owners] + np.arange(len(ids))
        width = -(-int((lengths + counts).max()) // BLOCK_TOKENS)
        places = np.array([kv.row for _, kv in sequences], np.int64)
        table = sequences[0][1].pool.table.rows[places[owners], :width]
        return StepRows(sequences, bucket_of(len(ids), width, most_rows), ids, counts, last, owners, positions, table)

    @property
    def padding(self) -> int:
        """Rows of the base that stand behind the others."""
        return 0 if self.bucket is None else self.bucket.rows - len(self.ids)

    @property
    def write(self) -> Slots:
        """Where in the pool each row's keys and values go."""
        blocks = self.table[np.arange(len(self.ids)), self.positions // BLOCK_TOKENS]
        return blocks * BLOCK_TOKENS + self.positions % BLOCK_TOKENS
