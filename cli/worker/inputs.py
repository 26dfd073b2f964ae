"""From a step's numbers to its tensors: at addresses that stay, or made for the one step."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from adapterd.cli.worker.batch import FlatBatch, Part, Table
from adapterd.cli.worker.kv import BLOCK_TOKENS, KeyValuePool, Slots
from adapterd.cli.worker.rows import ROW_BUCKETS, TABLE_ENTRIES, Bucket, StepRows, bucket_of

Numbers = TypeVar("Numbers", Tensor, Slots)
_HEADS = 4
"""Numbers a row: id, position, where it writes; and as many last rows as rows."""


class StaticInputs:
    """The input of every step that is padded to a bucket: one buffer, the same places for the same bucket.

    Args:
        pool: of the keys and values, on the model's device.
    """

    def __init__(self, pool: KeyValuePool, device: torch.device) -> None:
        size = _HEADS * ROW_BUCKETS[-1] + TABLE_ENTRIES
        self._pool = pool
        self._memory = torch.zeros(size, dtype=torch.int64, device=device)
        self._staged = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers: Slots = self._staged.numpy()
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def batch(self, bucket: Bucket) -> FlatBatch:
        """Steps of this bucket, whatever is in them. To be made once for each run or capture: it keeps masks."""
        ids, positions, write, last, blocks = _parts(self._memory, bucket)
        return FlatBatch(self._pool, ids, positions, write, last, Table(blocks.view(*bucket), positions))

    def send(self, step: StepRows, bucket: Bucket) -> None:
        """Puts a step in, in the current stream. Rows of padding are the token 0 of nobody, which sees itself."""
        if self._sent is not None:
            self._sent.synchronize()  # of the step before, whose tokens are known: only a failed step is waited for
        numbers = self._numbers[: bucket.rows * (_HEADS + bucket.blocks)]
        numbers[: bucket.rows * _HEADS] = 0
        ids, positions, write, last, blocks = _parts(numbers, bucket)
        rows = len(step.ids)
        ids[:rows], positions[:rows], write[:rows] = step.ids, step.positions, step.write
        last[: len(step.last)] = step.last
        step.fill_table(blocks.reshape(*bucket), step.owners)
        self._memory[: len(numbers)].copy_(self._staged[: len(numbers)], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def _parts(numbers: Numbers, bucket: Bucket) -> tuple[Numbers, ...]:
    ends = [*(at * bucket.rows for at in range(1 + _HEADS)), bucket.rows * (_HEADS + bucket.blocks)]
    return tuple([numbers[begin:end] for begin, end in pairwise(ends)])


def made_for(step: StepRows, pool: KeyValuePool, device: torch.device, most_rows: int) -> FlatBatch:
    """A step of any size, in tensors of its own: sequences of one row by table, the others each by itself."""
    singles = [owner for owner, count in enumerate(step.counts) if count == 1]
    width = max((len(step.sequences[owner][1].blocks) for owner in singles), default=1)
    looked_up = bucket_of(len(singles), width, most_rows)
    if looked_up is None:
        singles = []
    table = np.zeros((len(singles), width), np.int64)
    step.fill_table(table, singles)
    apart = [owner for owner in range(len(step.counts)) if looked_up is None or step.counts[owner] > 1]
    keys = [_keys_of(step, owner) for owner in apart]
    numbers = [np.array(step.ids), step.positions, step.write, step.last, step.last[singles], table.ravel(), *keys]
    sent = torch.from_numpy(np.concatenate(numbers, dtype=np.int64)).to(device)
    ids, positions, write, last, rows, blocks, *slots = torch.split(sent, [len(n) for n in numbers])
    stops = [int(step.last[owner]) + 1 for owner in apart]
    parts = [Part(stop - step.counts[owner], stop, own) for owner, stop, own in zip(apart, stops, slots, strict=True)]
    lookup = Table(blocks.view(table.shape), positions.index_select(0, rows), rows) if singles else None
    return FlatBatch(pool, ids, positions, write, last, lookup, parts)


def _keys_of(step: StepRows, owner: int) -> Slots:
    kv = step.sequences[owner][1]
    assert len(kv.blocks) * BLOCK_TOKENS >= kv.length + step.counts[owner]
    return kv.slots(0, kv.length + step.counts[owner])
