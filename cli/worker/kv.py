"""Keys and values: one pool of blocks at addresses that never change, and the blocks of each sequence.

A captured CUDA graph reads and writes the pool, so nothing of it is ever allocated anew. A block is one sequence's
alone while it has it, and is zeroed before anything is written to it: rows that share a lookup table's width read
behind their own tokens, under a mask that a NaN of an earlier owner would get through. All that a step's sequences have
taken is zeroed at once (`KeyValuePool.clear`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapterd.loader.errors import Code, error

BLOCK_TOKENS = 16
"""Tokens of a block."""
NOBODY = 0
"""The block that rows of padding write to."""

Block = tuple[Tensor, ...]
"""A copy of some tokens' keys and values: for each shape that layers have, [keys and values, tokens, heads, size]."""
Slots = npt.NDArray[np.int64]


class BlockTable:
    """The blocks of each sequence that has any, a row each: what a step looks up is one look into it.

    It grows by doubling, up to the most sequences that had blocks at once, by the most blocks that one had.

    Attributes:
        rows: int64 [rows, blocks]; NOBODY behind a sequence's own.
    """

    def __init__(self) -> None:
        self.rows: Slots = np.full((16, 16), NOBODY, np.int64)
        self._free = list(range(len(self.rows)))

    def take(self) -> int:
        """A row that is nobody's."""
        if not self._free:
            self._free = list(range(len(self.rows), 2 * len(self.rows)))
            self.rows = np.vstack([self.rows, np.full_like(self.rows, NOBODY)])
        return self._free.pop()

    def put(self, row: int, at: int, blocks: Sequence[int]) -> None:
        """The row's blocks from `at` on."""
        while at + len(blocks) > self.rows.shape[1]:
            self.rows = np.hstack([self.rows, np.full_like(self.rows, NOBODY)])
        self.rows[row, at : at + len(blocks)] = blocks

    def give(self, row: int) -> None:
        """Takes it back."""
        self.rows[row] = NOBODY
        self._free.append(row)


class KeyValuePool:
    """The storage. Not thread-safe; in stream order on a device.

    Attributes:
        table: which blocks are whose.
        fresh: blocks that were taken and are not zeroed yet, in the order in which they were.

    Args:
        layers: by layer, what one token's keys and values look like, each [heads, size].
        blocks: how many there are, beside that of nobody.

    Raises:
        Unavailable: DEVICE_ERROR, the device has no memory for them.
    """

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]], blocks: int) -> None:
        alike: dict[tuple[torch.Size, torch.dtype], list[tuple[int, int]]] = {}
        for layer, pair in layers.items():
            for which, token in enumerate(pair):
                alike.setdefault((token.shape, token.dtype), []).append((layer, which))
        device = next(iter(layers.values()))[0].device
        try:
            self.groups = [
                torch.zeros(len(members), 1 + blocks, BLOCK_TOKENS, *shape, dtype=dtype, device=device)
                for (shape, dtype), members in alike.items()
            ]
        except RuntimeError as fault:
            raise error(
                Code.DEVICE_ERROR, str(device), f"no memory for the keys and values of {blocks} blocks",
                "Start the worker with fewer --kv-blocks, or less --vram.",
            ) from fault  # fmt: skip
        where = {
            member: group[place]
            for group, members in zip(self.groups, alike.values(), strict=True)
            for place, member in enumerate(members)
        }
        self._layers = {layer: (where[layer, 0], where[layer, 1]) for layer in layers}
        self.blocks, self.table = blocks, BlockTable()
        self.fresh: dict[int, None] = {}
        self._free = list(range(blocks, NOBODY, -1))

    @property
    def block_bytes(self) -> int:
        """Of a block, over all layers."""
        return sum(group[:, 0].nbytes for group in self.groups)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Its keys and values, [1 + blocks, 16, heads, size] each."""
        return self._layers[layer]

    def take(self, count: int) -> list[int]:
        """So many blocks, of zeros once they are cleared. Raises Unavailable: BUDGET_EXCEEDED, and takes none then."""
        if count > len(self._free):
            raise error(
                Code.BUDGET_EXCEEDED, "keys and values",
                f"{count} blocks of {BLOCK_TOKENS} tokens are needed, {len(self._free)} of {self.blocks} are free",
                "Ask again when others have ended, or start the worker with more --kv-blocks.",
            )  # fmt: skip
        taken = [self._free.pop() for _ in range(count)]
        self.fresh.update(dict.fromkeys(taken))
        return taken

    def clear(self, at: Tensor | None = None) -> None:
        """Zeroes the fresh blocks, in the current stream: before anything is written to them.

        Args:
            at: their numbers, int64 on the pool's device: one launch then instead of one each.
        """
        if not self.fresh:
            return
        for group in self.groups:
            if at is not None:
                group.index_fill_(1, at, 0)
                continue
            for block in self.fresh:
                group[:, block].zero_()
        self.fresh.clear()

    def give(self, blocks: Sequence[int]) -> None:
        """Takes them back."""
        self._free += blocks


class KeyValues:
    """Those of one sequence. A forward writes behind `length`, and what it wrote counts once it is committed.

    Attributes:
        length: tokens that are in.
        pool: the storage.
        row: of the pool's table, while it has blocks.
    """

    def __init__(self, pool: KeyValuePool) -> None:
        self.length, self.pool = 0, pool
        self.row: int | None = None
        self._count = 0  # blocks

    @property
    def blocks(self) -> Slots:
        """Of the pool, in the order of the tokens."""
        return self.pool.table.rows[self.row, : self._count] if self.row is not None else np.empty(0, np.int64)

    @property
    def nbytes(self) -> int:
        """Of its blocks, room to grow included."""
        return self._count * self.pool.block_bytes

    def reserve(self, tokens: int) -> None:
        """Has blocks for so many tokens behind those that are in. Raises Unavailable: BUDGET_EXCEEDED."""
        missing = self.length + tokens - self._count * BLOCK_TOKENS
        if missing > 0:
            taken = self.pool.take(-(-missing // BLOCK_TOKENS))
            if self.row is None:
                self.row = self.pool.table.take()
            self.pool.table.put(self.row, self._count, taken)
            self._count += len(taken)

    def slots(self, start: int, stop: int) -> Slots:
        """Where in the pool the tokens [start, stop) are, in tokens."""
        token = np.arange(start, stop)
        return self.blocks[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS

    def commit(self, tokens: int) -> None:
        """The forward went well: what it put behind is in."""
        self.length += tokens

    def copy_out(self, start: int, stop: int) -> Block:
        """A copy of the tokens [start, stop), which must be in."""
        assert stop <= self.length
        return tuple(
            torch.cat([group[:, block, begin:end] for block, begin, end in self._pieces(start, stop)], dim=1)
            for group in self.pool.groups
        )

    def copy_in(self, block: Block) -> None:
        """Puts a copied block behind the tokens that are in. Raises Unavailable: BUDGET_EXCEEDED."""
        tokens = block[0].shape[1]
        self.reserve(tokens)
        self.pool.clear()
        for group, copied in zip(self.pool.groups, block, strict=True):
            at = 0
            for number, begin, end in self._pieces(self.length, self.length + tokens):
                group[:, number, begin:end] = copied[:, at : at + end - begin]
                at += end - begin
        self.commit(tokens)

    def free(self) -> None:
        """Lets go of everything. Idempotent."""
        row, blocks = self.row, self.blocks.tolist()
        self.row, self.length, self._count = None, 0, 0
        if row is not None:
            self.pool.table.give(row)
            self.pool.give(blocks)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(block, from, to) of the tokens [start, stop)."""
        while start < stop:
            first = start % BLOCK_TOKENS
            end = min(BLOCK_TOKENS, first + stop - start)
            yield int(self.blocks[start // BLOCK_TOKENS]), first, end
            start += end - first
