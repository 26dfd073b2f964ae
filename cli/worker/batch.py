"""One step's rows on the device: where each writes its keys and values, and which ones it sees.

Two ways to attend, for any mix of prompts and single tokens, with the same results up to rounding:

* `Table`: each row looks up its own sequence's blocks and sees those up to its position. All that differs from step
  to step is in tensors, so that a captured graph serves any step of its size. Blocks are gathered anew for each row.
* `Part`: a sequence's rows together, over just its own keys. For long prompts and contexts; never captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from adapterd.cli.worker.attention import Heads
from adapterd.cli.worker.kv import BLOCK_TOKENS, KeyValuePool


@dataclass(slots=True)
class Table:
    """Rows of any sequences.

    Attributes:
        blocks: int64 [rows, blocks]; those behind a row's own are any.
        positions: int64 [rows].
        rows: which ones of the batch these are; None: all.
    """

    blocks: Tensor
    positions: Tensor
    rows: Tensor | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, heads: Heads, keys: Tensor, values: Tensor) -> Tensor:
        """[rows, heads, size], over the pool's `keys` and `values` of the layer."""
        query = heads.query[0] if self.rows is None else heads.query[0].index_select(1, self.rows)
        kv_heads, size = keys.shape[2:]
        # Heads that share a kv head stand as so many rows before it: no copy of keys for each of them.
        grouped = query.transpose(0, 1).reshape(len(self.positions), kv_heads, -1, size)
        attended = scaled_dot_product_attention(
            grouped, self._own(keys), self._own(values), attn_mask=self._mask(heads), scale=heads.scale
        )
        return attended.reshape(len(self.positions), query.shape[0], values.shape[3])

    def _own(self, pool: Tensor) -> Tensor:
        """[rows, kv heads, tokens, size]."""
        rows, blocks = self.blocks.shape
        gathered = pool.index_select(0, self.blocks.reshape(-1))
        return gathered.view(rows, blocks * BLOCK_TOKENS, *pool.shape[2:]).transpose(1, 2)

    def _mask(self, heads: Heads) -> Tensor:
        """0 or −inf, [rows, 1, 1, tokens]. A row sees itself at least. Made once a step."""
        if heads.window not in self._masks:
            token = torch.arange(self.blocks.shape[1] * BLOCK_TOKENS, device=self.blocks.device)
            own = self.positions[:, None]
            hidden = token > own
            if heads.window is not None:
                hidden |= token <= own - heads.window
            mask = torch.zeros(hidden.shape, dtype=heads.query.dtype, device=hidden.device)
            self._masks[heads.window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[heads.window]


@dataclass(slots=True)
class Part:
    """One sequence's rows, [start, stop) of the batch.

    Attributes:
        slots: int64, where its keys are in the pool, those of these rows last.
    """

    start: int
    stop: int
    slots: Tensor
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def attend(self, heads: Heads, keys: Tensor, values: Tensor) -> Tensor:
        """[rows, heads, size]."""
        own_keys, own_values = (pool.flatten(0, 1).index_select(0, self.slots) for pool in (keys, values))
        attended: Tensor = scaled_dot_product_attention(
            heads.query[:, :, self.start : self.stop],
            own_keys.transpose(0, 1)[None], own_values.transpose(0, 1)[None],
            attn_mask=self._mask(heads.window), scale=heads.scale,
            enable_gqa=heads.query.shape[1] != keys.shape[2],
        )  # fmt: skip
        return attended[0].transpose(0, 1)

    def _mask(self, window: int | None) -> Tensor | None:
        """Which keys each row sees, [rows, keys]: those up to its own, `window` of them at most. None: all."""
        rows, keys = self.stop - self.start, len(self.slots)
        if rows == 1 and (window is None or keys <= window):
            return None
        if window not in self._masks:
            key = torch.arange(keys, device=self.slots.device)
            row = key[keys - rows :, None]
            seen = key <= row
            self._masks[window] = seen if window is None else seen & (key > row - window)
        return self._masks[window]


@dataclass(slots=True)
class FlatBatch:
    """A step's rows; an `attention.Attended`.

    Attributes:
        ids, positions: int64 [rows].
        write: int64 [rows], where in the pool each row's keys and values go.
        last: int64 [sequences], each one's last row.
        table, parts: how the rows attend; each row is in one of them.
    """

    pool: KeyValuePool
    ids: Tensor
    positions: Tensor
    write: Tensor
    last: Tensor
    table: Table | None
    parts: Sequence[Part] = ()

    def attend(self, heads: Heads) -> Tensor:
        """See `Attended`. First all rows write, then all look up: a row sees those before it in its own step."""
        keys, values = self.pool.layer(heads.layer)
        keys.flatten(0, 1).index_copy_(0, self.write, heads.key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, self.write, heads.value[0].transpose(0, 1))
        if self.table is not None and self.table.rows is None:
            return self.table.attend(heads, keys, values)[None]
        out = heads.query.new_empty(len(self.ids), heads.query.shape[1], values.shape[3])
        if self.table is not None and self.table.rows is not None:
            out.index_copy_(0, self.table.rows, self.table.attend(heads, keys, values))
        for part in self.parts:
            out[part.start : part.stop] = part.attend(heads, keys, values)
        return out[None]
