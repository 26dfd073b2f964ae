"""Where the values of each tensor go in the packed form, any stretch of them, in any order, by any thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterd.loader.image import PackedImage
from adapterd.loader.layout import ITEM_BYTES, Layout
from adapterd.loader.manifest import Manifest, TensorEntry

_TILE_BYTES = 16 << 10
"""Of B are transposed at once: what fits the innermost cache twice is copied 2 to 5 times as fast."""
MOST_TURNED = 4 << 20
"""Bytes of a B that is transposed where it lies: as many a thread needs beside it."""


@dataclass(slots=True, eq=False)
class Placing:
    """One tensor, and its blocks in the image. Made by the hundred for each load, so not frozen; nothing changes it.

    Attributes:
        tensor: A [rank, in] or B [out, rank], in the file's order.
        is_b: it is stored transposed.
        step: rank rows of a block; the last may have fewer.
        width: of a row of the blocks, in elements.
        bits: of the layout's dtype, as an unsigned integer.
        parts: per block, ordered by rank row, its bytes in the image.
        kept: [begin, end) of the columns of A, or rows of B, that are packed, in this order; None for all.
        lands: its blocks have room for just the bytes that it has in the file, so that these can be read into them:
            those of A are in place then, those of B are still to be turned.
    """

    tensor: TensorEntry
    is_b: bool
    step: int
    width: int
    bits: str
    parts: tuple[memoryview, ...]
    kept: tuple[tuple[int, int], ...] | None = None
    lands: bool = False

    @property
    def blocks(self) -> tuple[NDArray[Any], ...]:
        """[rows, width] of the image: bits of the layout's dtype."""
        return tuple(np.frombuffer(part, self.bits).reshape(-1, self.width) for part in self.parts)

    def landing(self, begin: int, end: int) -> list[memoryview]:
        """Where bytes [begin, end) of the tensor's, as the file has them, are to land."""
        if len(self.parts) == 1:
            return [self.parts[0][begin:end]]
        found, first = [], 0
        for part in self.parts:
            piece = part[max(begin - first, 0) : max(end - first, 0)]
            if piece:
                found.append(piece)
            first += len(part)
        return found

    def turn(self, spare: memoryview) -> None:
        """Transpose a B whose bytes have landed. `spare` has room for twice as many: what it held is lost.

        Few calls, because threads that do the same meet in the interpreter.
        """
        if len(self.parts) > 1:
            self._turn_blocks(spare)
            return
        landed = np.frombuffer(self.parts[0], self.bits)
        aside = np.frombuffer(spare, self.bits, len(landed))
        aside[...] = landed
        # Rows of a block are 16 at most, so what is read for one lies near what is read for the next.
        landed.reshape(-1, self.width)[...] = aside.reshape(self.width, -1).T

    def _turn_blocks(self, spare: memoryview) -> None:
        size, done = self.tensor.nbytes, self.tensor.nbytes
        for part in self.parts:
            np.frombuffer(spare, np.uint8, len(part), done)[...] = np.frombuffer(part, np.uint8)
            done += len(part)
        count = size // np.dtype(self.bits).itemsize
        values = np.frombuffer(spare, self.bits, count, size).reshape(self.width, -1)
        self._put_outputs(0, values, np.frombuffer(spare, self.bits, count))

    def put(self, first: int, values: NDArray[Any]) -> None:
        """Write values number `first` and following, counted as they lie in the file, so far as they are packed."""
        if self.kept is not None:
            self._put_kept(first, values, self.kept)
        elif self.is_b:
            self._put_columns(first, values)
        else:
            self._put_rows(first, values)

    def _put_kept(self, first: int, values: NDArray[Any], kept: tuple[tuple[int, int], ...]) -> None:
        done = 0
        for begin, end in kept:
            if self.is_b:
                self._put_outputs_kept(first, values, begin, end, done)
            else:
                self._put_inputs_kept(first, values, begin, end, done)
            done += end - begin

    def _put_outputs_kept(self, first: int, values: NDArray[Any], begin: int, end: int, done: int) -> None:
        """Rows [begin, end) of B stand together in the file; they are outputs `done` and following here."""
        rank = self.tensor.shape[1]
        low, high = max(first, begin * rank), min(first + len(values), end * rank)
        if low < high:
            self._put_columns(low - (begin - done) * rank, values[low - first : high - first])

    def _put_inputs_kept(self, first: int, values: NDArray[Any], begin: int, end: int, done: int) -> None:
        """Columns [begin, end) of A: a piece of each of its rows."""
        width, stop, blocks = self.tensor.shape[1], first + len(values), self.blocks
        for row in range(first // width, -(-stop // width)):
            low, high = max(first, row * width + begin), min(stop, row * width + end)
            if low < high:
                column = low - row * width - begin + done
                target = blocks[row // self.step][row % self.step]
                target[column : column + high - low] = values[low - first : high - first]

    def _put_rows(self, first: int, values: NDArray[Any]) -> None:
        """A lies in the image as in the file, cut into blocks."""
        size, blocks = self.step * self.tensor.shape[1], self.blocks
        end = first + len(values)
        for index in range(first // size, (end - 1) // size + 1):
            begin = max(first, index * size)
            part = values[begin - first : min(end, (index + 1) * size) - first]
            begin -= index * size
            blocks[index].reshape(-1)[begin : begin + len(part)] = part

    def _put_columns(self, first: int, values: NDArray[Any]) -> None:
        """Values of B come by output; whole outputs are columns of the image, at both ends there may be pieces."""
        rank = self.tensor.shape[1]
        output, begin = divmod(first, rank)
        if begin:
            head, values = values[: rank - begin], values[rank - begin :]
            self._put_piece(output, begin, head)
            output += 1
        whole = len(values) // rank
        self._put_outputs(output, values[: whole * rank].reshape(whole, rank))
        self._put_piece(output + whole, 0, values[whole * rank :])

    def _put_piece(self, output: int, row: int, values: NDArray[Any]) -> None:
        blocks = self.blocks if len(values) else ()
        for value in values:
            blocks[row // self.step][row % self.step, output] = value
            row += 1

    def _put_outputs(self, output: int, values: NDArray[Any], spare: NDArray[Any] | None = None) -> None:
        """Transposes tile by tile, in two copies: each is one call for many tiles, so that threads seldom meet.

        `spare` has room for as many values; None: memory of its own.
        """
        count, rank = values.shape
        tile = max(_TILE_BYTES // (values.itemsize * rank), 1)
        tiles, whole = count // tile, count // tile * tile
        turned = np.empty(whole * rank, values.dtype) if spare is None else spare[: whole * rank]
        turned = turned.reshape(tiles, rank, tile)
        turned[...] = values[:whole].reshape(tiles, tile, rank).transpose(0, 2, 1)
        last = values[whole:].T
        for index, block in enumerate(self.blocks):
            rows = slice(index * self.step, (index + 1) * self.step)
            mine = block[:, output : output + whole].reshape(len(block), tiles, tile)  # a view: an axis is split
            mine[...] = turned[:, rows].transpose(1, 0, 2)
            block[:, output + whole : output + count] = last[rows]


def placings(manifest: Manifest, layout: Layout, image: PackedImage) -> list[Placing]:
    """For every tensor, ordered as they lie in the file. What belongs to no block of `image` is zero afterwards."""
    spans = layout.spans()
    _clear_gaps(image, spans)
    bits = f"u{ITEM_BYTES[layout.dtype]}"
    parts = image.within(spans)
    kept: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for module, matrix, begin, end in layout.cuts.tolist():
        kept.setdefault((module, matrix), []).append((begin, end))
    found, first = [], 0
    rows, widths = layout.table[:, 3].tolist(), layout.table[:, 4].tolist()
    counts = np.bincount(2 * layout.table[:, 0] + layout.table[:, 1], minlength=2 * len(manifest.modules)).tolist()
    for index, module in enumerate(manifest.modules):
        for matrix, tensor in enumerate((module.a, module.b)):
            cut = tuple(kept[index, matrix]) if (index, matrix) in kept else None
            lands = cut is None and tensor.dtype == layout.dtype and (not matrix or tensor.nbytes <= MOST_TURNED)
            mine, step = tuple(parts[first : first + counts[2 * index + matrix]]), rows[first]
            found.append(Placing(tensor, matrix == 1, step, widths[first], bits, mine, cut, lands))
            first += len(mine)
    return sorted(found, key=lambda placing: placing.tensor.begin)


def _clear_gaps(image: PackedImage, spans: NDArray[np.int64]) -> None:
    inside = np.sort(spans.reshape(-1))  # spans do not overlap, so begins and ends take turns
    gaps = np.concatenate([[0], inside, [image.nbytes]]).reshape(-1, 2)
    for begin, end in gaps[gaps[:, 0] < gaps[:, 1]].tolist():
        for part in image.parts(begin, end):
            np.frombuffer(part, np.uint8)[:] = 0
