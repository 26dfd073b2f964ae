"""How large the kernels' tables and plans are: arithmetic for the engine that allocates them, and for who asks first.

Without torch, so that `fit` can say it on a machine that has none. What stands in the tables: `engine.device_tables`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapterd.loader.checks.fit import SERVED, head_paths
from adapterd.loader.layout import ITEM_BYTES, Dtype
from adapterd.loader.planning import block_rows
from adapterd.loader.sharding import WHOLE, Sharding

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec

MAX_RANK = 128
"""Of a module, that the kernels' tables have room for unless told otherwise."""
MOST_ROWS = 16_384
"""Rows of a step that the plan's buffers hold; a longer one is the reference's."""
HEAD_NAMES = frozenset({"lm_head", "embed_out", "score", "classifier", "pooler"})
"""Path parts of modules that see a few rows of the step only (the last token, the first): heads and poolers.

For models that do not say so themselves (`get_output_embeddings`, `base_model`), as transformers' do.
"""
PLAN_ENTRY, PLAN_ALIGN = 8, 32  # int32s of an entry of a plan's lists, and of 128 bytes, where each list begins
_CELL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Matrix:
    """One served module: its row in the tables is its place in the list it stands in."""

    name: str
    in_features: int
    out_features: int


def rows_of_block(matrix: Matrix, dtype: Dtype, page_bytes: int) -> int:
    """Rank rows of a block of this module, as the loader cuts it; 1 where it could not, so that no adapter has it."""
    if max(matrix.in_features, matrix.out_features) * ITEM_BYTES[dtype] > page_bytes:
        return 1
    return block_rows(matrix, dtype, page_bytes)


class TableShape:
    """Sizes of the tables for the modules that an engine serves.

    Args:
        matrices: served modules.
        slots: of the cache.
        max_rank: of one module of one adapter, that the tables have room for.
        dtype, page_bytes: of the arena that kernels read.

    Attributes:
        slots: that the tables have room for; residents in others are not served.
        rows: rank rows of a block, by matrix.
        entries: cells a matrix, a power of two.
        stride: cells a slot.
    """

    def __init__(self, matrices: Sequence[Matrix], slots: int, max_rank: int, dtype: Dtype, page_bytes: int) -> None:
        self.matrices, self.dtype, self.page_bytes = tuple(matrices), dtype, page_bytes
        self.index: Mapping[str, int] = {matrix.name: i for i, matrix in enumerate(self.matrices)}
        self.rows = tuple(rows_of_block(matrix, dtype, page_bytes) for matrix in self.matrices)
        most = max((-(-max_rank // rows) for rows in self.rows), default=1)
        self.entries = max(2, 1 << (most - 1).bit_length())  # two at least: every matrix begins at 16 bytes
        self.plane = len(self.matrices) * self.entries
        self.stride = 3 * self.plane
        self.slots = min(slots, (2**31 - 1) // max(self.stride, 1))  # cells have 32-bit numbers

    @property
    def row_bytes(self) -> int:
        """Of one slot."""
        return self.stride * _CELL_BYTES

    @property
    def nbytes(self) -> int:
        """Of all slots, on the device."""
        return self.slots * self.row_bytes


def plan_words(most_rows: int) -> int:
    """int32s of the buffer that holds any step's plan of so many rows."""
    return 64 * most_rows + 16 * PLAN_ENTRY * PLAN_ALIGN


def served_by_default(base: BaseSpec, sharding: Sharding = WHOLE) -> Iterator[Matrix]:
    """What an engine wraps of a model with this table, as far as a table can tell: its linears without its heads.

    A live model can tell more (`LoRAEngine`): an engine leaves out what stands outside of its body, too.

    Raises:
        Failed: SETTINGS_INVALID as `Sharding.cut`.
    """
    heads = head_paths(base)
    for module in base.modules:
        if module.kind in SERVED and module.path not in heads and HEAD_NAMES.isdisjoint(module.path.split(".")):
            cut = sharding.cut(module.path, module.in_features, module.out_features)
            yield Matrix(module.path, cut.in_features, cut.out_features)
