"""Weights of small integers with a scale and a zero point a group of inputs: scale · (q - zero). GPTQ and AWQ.

GPTQ packs words along the inputs, qweight [in/p, out]; AWQ along the outputs, qweight [in, out/p]. Both have
qzeros [groups, out/p] and scales [groups, out]. GPTQ's first format stores zero points less one, and may say in
g_idx [in] which group an input belongs to; without it groups follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.text import shown
from adapterd.loader.merge.matrices import NUMPY, Range, Stored, check_features
from adapterd.loader.merge.packing import (
    WORD_BITS,
    Order,
    in_order,
    pack_columns,
    pack_rows,
    unpack_columns,
    unpack_rows,
)
from adapterd.loader.merge.shards import Patch


@dataclass(frozen=True, eq=False)
class Grouped:
    """One such weight, [out, in].

    Attributes:
        groups: the group of each input, [in].
        order: of the values in a word.
        by_rows: words run along the inputs.
        zero_offset: what is added to a stored zero point.
        symmetric: zero points are all in the middle.
    """

    path: str
    qweight: Stored
    qzeros: Stored
    scales: Stored
    g_idx: Stored | None
    groups: NDArray[Any]
    order: Order
    by_rows: bool
    zero_offset: int
    symmetric: bool

    @classmethod
    def of(
        cls,
        path: str,
        parts: Mapping[str, Stored],
        order: Order,
        group_size: int,
        *,
        by_rows: bool,
        zero_offset: int,
        symmetric: bool,
    ) -> Grouped:
        """
        Args:
            group_size: inputs of a group where there is no g_idx; less than 1 is one group for all.

        Raises:
            Refused: SHAPE_MISMATCH, DTYPE_UNSUPPORTED where the tensors do not make a weight together.
        """
        qweight, qzeros, scales, g_idx = (parts.get(n) for n in ("qweight", "qzeros", "scales", "g_idx"))
        assert qweight is not None and qzeros is not None and scales is not None
        _check(path, qweight, qzeros, scales, g_idx, len(order), by_rows=by_rows)
        count = qweight.entry.shape[0] * (len(order) if by_rows else 1)
        check_features(path, scales.entry.shape[1], count)
        groups = _groups(path, count, scales.entry.shape[0], group_size, g_idx)
        return cls(path, qweight, qzeros, scales, g_idx, groups, order, by_rows, zero_offset, symmetric)

    @property
    def leading(self) -> Stored:
        """The tensor in whose place the floats are written."""
        return self.qweight

    @property
    def parts(self) -> tuple[Stored, ...]:
        parts = (self.qweight, self.qzeros, self.scales)
        return parts if self.g_idx is None else (*parts, self.g_idx)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return self.scales.entry.shape[1], len(self.groups)

    @property
    def step(self) -> int:
        """What ranges of outputs and inputs are multiples of: the values of a word."""
        return len(self.order)

    @property
    def largest(self) -> int:
        """The largest integer."""
        return int((1 << (WORD_BITS // self.step)) - 1)

    def block(self, outputs: Range, inputs: Range) -> NDArray[Any]:
        """[outputs, inputs] as float32; both ranges are multiples of `step`."""
        wanted = self.groups[slice(*inputs)]
        first, last = int(wanted.min()), int(wanted.max()) + 1
        scales = self.scales.block((first, last), outputs).astype(np.float32)
        zeros = unpack_columns(self.qzeros.block((first, last), self._words(outputs)), self._zero_order)
        integers = self._integers(outputs, inputs) - (zeros + self.zero_offset)[wanted - first]
        values: NDArray[Any] = integers.astype(np.float32)
        values *= scales[wanted - first]
        return values.T

    def _integers(self, outputs: Range, inputs: Range) -> NDArray[Any]:
        """[inputs, outputs]."""
        if self.by_rows:
            return unpack_rows(self.qweight.block(self._words(inputs), outputs), self.order)
        return unpack_columns(self.qweight.block(inputs, self._words(outputs)), self.order)

    @property
    def _zero_order(self) -> Order:
        return in_order(WORD_BITS // self.step) if self.by_rows else self.order

    def _words(self, values: Range) -> Range:
        return values[0] // self.step, values[1] // self.step

    # -------------------------------------------------------------- back into integers

    def quantised(self, outputs: Range, weight: NDArray[Any]) -> tuple[NDArray[Any], list[Patch]]:
        """Round to the nearest integer with fresh scales and zero points, a group at a time.

        Args:
            weight: [outputs, in], all inputs.

        Returns:
            What the integers mean, [outputs, in], and the bytes to put over the old ones.

        Raises:
            Refused: NONFINITE where a scale does not fit the dtype of scales.
        """
        dtype = NUMPY[self.scales.entry.dtype]
        low, high = self._ends(weight)
        with np.errstate(over="ignore"):
            stored = self._scale(low, high).astype(dtype)
        if not np.isfinite(stored).all():
            raise error(Code.NONFINITE, shown(self.path), f"a scale does not fit {self.scales.entry.dtype}")
        scales = stored.astype(np.float32)  # [groups, outputs]
        scales = np.where(scales == 0, np.float32(1), scales)
        stored = scales.astype(dtype)
        zeros = self._zeros(low, scales)
        scales_in, zeros_in = scales[self.groups], zeros[self.groups].astype(np.float32)  # [in, outputs]
        integers = np.clip(np.rint(weight.T / scales_in) + zeros_in, 0, self.largest)
        meant = (integers - zeros_in) * scales_in
        return meant.T, list(self._patches(outputs, integers.astype(np.int32), zeros, stored))

    def _ends(self, weight: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Lowest and highest of each group and output, [groups, outputs]; zero is always among them."""
        order = np.argsort(self.groups, kind="stable")
        starts = np.searchsorted(self.groups[order], np.arange(self.scales.entry.shape[0]))
        by_group = weight.T[order]
        low: NDArray[Any] = np.minimum.reduceat(by_group, starts, axis=0)
        high: NDArray[Any] = np.maximum.reduceat(by_group, starts, axis=0)
        return np.minimum(low, 0), np.maximum(high, 0)

    def _scale(self, low: NDArray[Any], high: NDArray[Any]) -> NDArray[Any]:
        width: NDArray[Any] = 2 * np.maximum(-low, high) if self.symmetric else high - low
        return width / self.largest

    def _zeros(self, low: NDArray[Any], scales: NDArray[Any]) -> NDArray[Any]:
        """GPTQ's first format cannot store a zero point of 0, nor can all readers add one to the largest."""
        if self.symmetric:
            return np.full(low.shape, (self.largest + 1) // 2, np.int32)
        zeros: NDArray[Any] = np.clip(np.rint(-low / scales), self.zero_offset, self.largest)
        return zeros.astype(np.int32)

    def _patches(
        self, outputs: Range, integers: NDArray[Any], zeros: NDArray[Any], scales: NDArray[Any]
    ) -> Iterator[Patch]:
        words = self._words(outputs)
        if self.by_rows:
            yield from _over(self.qweight, pack_rows(integers, self.order), outputs[0])
        else:
            yield from _over(self.qweight, pack_columns(integers, self.order), words[0])
        yield from _over(self.qzeros, pack_columns(zeros - self.zero_offset, self._zero_order), words[0])
        yield from _over(self.scales, scales, outputs[0])


def _over(stored: Stored, block: NDArray[Any], column: int) -> Iterator[Patch]:
    """`block` over all rows of a matrix, from `column` on: one patch if that is the whole width, else one a row."""
    entry = stored.entry
    item, width = NUMPY[entry.dtype].itemsize, entry.shape[1]
    if block.shape == entry.shape:
        yield Patch(stored.file, entry.begin, np.ascontiguousarray(block).tobytes())
        return
    for row in range(entry.shape[0]):
        yield Patch(stored.file, entry.begin + (row * width + column) * item, block[row].tobytes())


def _groups(path: str, inputs: int, count: int, size: int, g_idx: Stored | None) -> NDArray[Any]:
    """Every group has an input. Raises Refused (SHAPE_MISMATCH)."""
    in_a_row = np.arange(inputs) // (min(size, inputs) if size > 0 else inputs)
    groups: NDArray[Any] = in_a_row if g_idx is None else g_idx.flat().astype(np.int64)
    if not np.array_equal(np.unique(groups), np.arange(count)):
        raise error(Code.SHAPE_MISMATCH, shown(path), f"its inputs do not fall into {count} groups")
    return groups


def _check(
    path: str, qweight: Stored, qzeros: Stored, scales: Stored, g_idx: Stored | None, per: int, *, by_rows: bool
) -> None:
    shapes = [t.entry.shape for t in (qweight, qzeros, scales)]
    dtypes = [t.entry.dtype for t in (qweight, qzeros)] + ([g_idx.entry.dtype] if g_idx else [])
    if set(dtypes) != {"I32"} or scales.entry.dtype not in {"F16", "BF16", "F32"}:
        raise error(Code.DTYPE_UNSUPPORTED, shown(path), f"is {', '.join(dtypes)} with scales of {scales.entry.dtype}")
    if any(len(shape) != 2 or not all(shape) for shape in shapes):
        raise error(Code.SHAPE_MISMATCH, shown(path), f"its parts are {', '.join(str(list(s)) for s in shapes)}")
    inputs, outputs = (shapes[0][0] * per, shapes[0][1]) if by_rows else (shapes[0][0], shapes[0][1] * per)
    fits = shapes[1] == (shapes[2][0], outputs // per) and shapes[2][1] == outputs and outputs % per == 0
    if not fits or inputs % per or (g_idx is not None and g_idx.entry.shape != (inputs,)):
        raise error(Code.SHAPE_MISMATCH, shown(path), f"its parts are {', '.join(str(list(s)) for s in shapes)}")
