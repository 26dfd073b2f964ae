"""FP8 weights [out, in] with a scale a block, or one for all: value · scale (transformers' fine-grained FP8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterd.loader.errors import Code, error
from adapterd.loader.formats.text import shown
from adapterd.loader.merge.matrices import Range, Stored, check_features

_SCALE_DTYPES = frozenset({"F32", "BF16", "F16"})


@dataclass(frozen=True, slots=True)
class Fp8:
    """One such weight.

    Attributes:
        block_shape: outputs and inputs that share a scale.
        step: what ranges are multiples of.
    """

    path: str
    weight: Stored
    scale: Stored
    block_shape: tuple[int, int]
    step: int = 1

    @classmethod
    def of(cls, path: str, weight: Stored, scale: Stored, block: object) -> Fp8:
        """Raises Refused (SHAPE_MISMATCH, DTYPE_UNSUPPORTED)."""
        shape, grid = weight.entry.shape, scale.entry.shape
        if weight.entry.dtype != "F8_E4M3" or scale.entry.dtype not in _SCALE_DTYPES:
            words = f"is {weight.entry.dtype} with scales of {scale.entry.dtype}"
            raise error(Code.DTYPE_UNSUPPORTED, shown(path), f"{words}, wanted F8_E4M3 with scales of floats")
        rows, columns = _block(block, shape)
        wanted = tuple(-(-n // size) for n, size in zip(shape, (rows, columns), strict=False))
        if len(shape) != 2 or (grid != wanted and not (wanted == (1, 1) and grid in ((), (1,)))):
            raise error(Code.SHAPE_MISMATCH, shown(path), f"is {list(shape)} with scales {list(grid)}")
        check_features(path, *shape)
        return cls(path, weight, scale, (min(rows, shape[0]), min(columns, shape[1])))

    @property
    def leading(self) -> Stored:
        """The tensor in whose place the floats are written."""
        return self.weight

    @property
    def parts(self) -> tuple[Stored, ...]:
        return self.weight, self.scale

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        n_out, n_in = self.weight.entry.shape
        return n_out, n_in

    def block(self, outputs: Range, inputs: Range) -> NDArray[np.float32]:
        """[outputs, inputs] as float32."""
        values = self.weight.block(outputs, inputs).astype(np.float32)
        down, across = self.block_shape
        first, last = outputs[0] // down, -(-outputs[1] // down)
        left, right = inputs[0] // across, -(-inputs[1] // across)
        rows = np.arange(*outputs) // down - first
        columns = np.arange(*inputs) // across - left
        values *= self._scales((first, last), (left, right))[rows][:, columns]
        return values

    def _scales(self, rows: Range, columns: Range) -> NDArray[Any]:
        if len(self.scale.entry.shape) < 2:
            return self.scale.flat().astype(np.float32).reshape(1, 1)
        return self.scale.block(rows, columns).astype(np.float32)


def _block(block: object, shape: tuple[int, ...]) -> tuple[int, int]:
    """As config.json has it; none is one block for all."""
    match block:
        case None:
            return (max(shape[0], 1), max(shape[-1], 1)) if shape else (1, 1)
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    where = "config.json.quantization_config.weight_block_size"
    raise error(Code.UNSUPPORTED_FEATURE, where, "is no pair of sizes")
