"""From a step's numbers to its tensors: at addresses that stay, or made for the one step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from adapterd.cli.worker.batch import FlatBatch, Part, Table
from adapterd.cli.worker.kv import NOBODY, KeyValuePool, Slots
from adapterd.cli.worker.rows import ROW_BUCKETS, TABLE_ENTRIES, Bucket, StepRows, bucket_of

Numbers = TypeVar("Numbers", Tensor, Slots)
MOST_SAID = 4096
"""Sequences whose tokens the next step may have before the host knows them."""
MOST_FRESH = 512
"""Fresh blocks whose numbers are sent with a step's own."""
_HEADS = 4
"""Numbers a row: id, position, where it writes; and as many last rows as rows."""


class StaticInputs:
    """The input of every step that is padded to a bucket: one buffer, the same places for the same bucket.

    Attributes:
        said: int64, the tokens that the sequences of the step before have said. An id below 0 stands for one of them.

    Args:
        pool: of the keys and values, on the model's device.
    """

    def __init__(self, pool: KeyValuePool, device: torch.device) -> None:
        size = _HEADS * ROW_BUCKETS[-1] + TABLE_ENTRIES + MOST_FRESH
        self._pool = pool
        self._memory = torch.zeros(size, dtype=torch.int64, device=device)
        self._staged = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers: Slots = self._staged.numpy()
        self.said = torch.zeros(MOST_SAID, dtype=torch.int64, device=device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def batch(self, bucket: Bucket, lasts: int) -> FlatBatch:
        """Steps of this bucket with so many last rows, whatever is in them. To be made once for each run or capture:
        it keeps masks."""
        ids, positions, write, last, blocks = _parts(self._memory, bucket)
        return FlatBatch(
            self._pool, spoken(ids, self.said), positions, write, last[:lasts],
            Table(blocks.view(*bucket), positions),
        )  # fmt: skip

    def send(self, step: StepRows, bucket: Bucket) -> Tensor | None:
        """Puts a step in, in the current stream. Rows of padding are the token 0 of nobody, which sees itself.

        Returns:
            The numbers of the pool's fresh blocks, on the device; None if there are none, or too many.
        """
        if self._sent is not None:
            self._sent.synchronize()  # of the step before, whose tokens are known: only a failed step is waited for
        own = bucket.rows * (_HEADS + bucket.blocks)
        fresh = [*self._pool.fresh] if len(self._pool.fresh) <= MOST_FRESH else []
        sent = own + len(fresh)
        self._lay_out(step, bucket)
        self._numbers[own:sent] = fresh
        self._memory[:sent].copy_(self._staged[:sent], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return self._memory[own:sent] if fresh else None

    def _lay_out(self, step: StepRows, bucket: Bucket) -> None:
        ids, positions, write, last, blocks = _parts(self._numbers[: bucket.rows * (_HEADS + bucket.blocks)], bucket)
        _pad(ids, step.ids)
        _pad(positions, step.positions)
        _pad(write, step.write)
        _pad(last, step.last)
        table, (rows, width) = blocks.reshape(*bucket), step.table.shape
        table[:rows, :width] = step.table
        table[:rows, width:] = NOBODY
        table[rows:] = NOBODY


def spoken(ids: Tensor, said: Tensor) -> Tensor:
    """The ids themselves: ~n is what sequence n of the step before has said."""
    return torch.where(ids < 0, said.index_select(0, (~ids).clamp_(min=0)), ids)


def _pad(room: Slots, numbers: Sequence[int] | Slots) -> None:
    room[: len(numbers)] = numbers
    room[len(numbers) :] = 0


def _parts(numbers: Numbers, bucket: Bucket) -> tuple[Numbers, ...]:
    ends = [*(at * bucket.rows for at in range(1 + _HEADS)), bucket.rows * (_HEADS + bucket.blocks)]
    return tuple([numbers[begin:end] for begin, end in pairwise(ends)])


def made_for(step: StepRows, pool: KeyValuePool, said: Tensor, most_rows: int) -> FlatBatch:
    """A step of any size, in tensors of its own: sequences of one row by table, the others each by itself."""
    singles = np.flatnonzero(step.counts == 1)
    looked_up = bucket_of(len(singles), step.table.shape[1], most_rows)
    if looked_up is None:
        singles = singles[:0]
    table = step.table[step.last[singles]]
    apart = [owner for owner in range(len(step.counts)) if looked_up is None or step.counts[owner] > 1]
    keys = [_keys_of(step, owner) for owner in apart]
    numbers = [np.array(step.ids), step.positions, step.write, step.last, step.last[singles], table.ravel(), *keys]
    sent = torch.from_numpy(np.concatenate(numbers, dtype=np.int64)).to(said.device)
    ids, positions, write, last, rows, blocks, *slots = torch.split(sent, [len(n) for n in numbers])
    stops = (step.last[apart] + 1).tolist()
    starts = (step.last[apart] + 1 - step.counts[apart]).tolist()
    parts = [Part(*each) for each in zip(starts, stops, slots, strict=True)]
    lookup = Table(blocks.view(table.shape), positions.index_select(0, rows), rows) if len(singles) else None
    return FlatBatch(pool, spoken(ids, said), positions, write, last, lookup, parts)


def _keys_of(step: StepRows, owner: int) -> Slots:
    kv = step.sequences[owner][1]
    return kv.slots(0, kv.length + int(step.counts[owner]))
