"""How much memory adapters take, and how many fit: said from manifests, equal to the books of a cache that has them.

    r · (K + N) · bytes    + alignment    + page slack    = pages · page_bytes
    of each module           of blocks      of the adapter

Nothing else is taken from the arena: true ranks, no scales and no zeros. The kernels' tables and the plan's buffer
stand beside it (`table_shape`), and so does scratch, some planes of fp32 a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adapterd.gpu_cache.host.loading import Dtypes, packed_dtype
from adapterd.gpu_cache.table_shape import MOST_ROWS, TableShape, plan_words
from adapterd.loader.layout import ALIGNMENT, Dtype
from adapterd.loader.manifest import Manifest, ModuleEntry
from adapterd.loader.planning import plan_layout
from adapterd.loader.sharding import WHOLE, Sharding

PLAN_BYTES = 4 * plan_words(MOST_ROWS)
"""Of the buffer that steps' plans are sent to, on the device; an engine has one."""


@dataclass(frozen=True, slots=True)
class ModuleFootprint:
    """What one module takes of the arena of one worker.

    Attributes:
        name, rank: of the module.
        in_features, out_features: that the worker holds, as a rank of a tensor-parallel group.
        nbytes: r · (K + N) · bytes, the values alone.
        alignment: bytes between the end of a block and the next place where one may begin.
        cells: blocks of A and of Bᵀ, that is cells of the slot's table row that are in use.
        scales, zeros: bytes; adapters are stored as floats, which have neither.
    """

    name: str
    rank: int
    in_features: int
    out_features: int
    nbytes: int
    alignment: int
    cells: int
    scales: int = 0
    zeros: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "rank": self.rank, "in_features": self.in_features, "out_features": self.out_features,
            "bytes": self.nbytes, "alignment": self.alignment, "cells": self.cells,
            "scales": self.scales, "zeros": self.zeros,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one adapter takes of the arena. Law: nbytes + alignment + slack == total_bytes.

    Attributes:
        dtype: of the packed form.
        pages, page_bytes: whole pages, which are the adapter's alone.
        modules: in the manifest's order.
    """

    dtype: Dtype
    pages: int
    page_bytes: int
    modules: tuple[ModuleFootprint, ...]

    @property
    def nbytes(self) -> int:
        """Of the values alone."""
        return sum(module.nbytes for module in self.modules)

    @property
    def alignment(self) -> int:
        return sum(module.alignment for module in self.modules)

    @property
    def cells(self) -> int:
        return sum(module.cells for module in self.modules)

    @property
    def total_bytes(self) -> int:
        """What the cache's counters grow by."""
        return self.pages * self.page_bytes

    @property
    def slack(self) -> int:
        """What is left at the ends of its pages."""
        return self.total_bytes - self.nbytes - self.alignment

    def as_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype, "bytes": self.nbytes, "alignment": self.alignment, "slack": self.slack,
            "pages": self.pages, "total_bytes": self.total_bytes, "cells": self.cells,
            "modules": [module.as_json() for module in self.modules],
        }  # fmt: skip


def footprint(manifest: Manifest, dtype: Dtypes, page_bytes: int, sharding: Sharding = WHOLE) -> Footprint:
    """What an adapter takes in a cache with these settings, all as in `CacheConfig`.

    Raises:
        Refused: QUOTA_EXCEEDED for a module of which one rank row is wider than a page.
        Failed: SETTINGS_INVALID as `Sharding.cut`.
    """
    layout = plan_layout(manifest, packed_dtype(dtype, manifest), page_bytes, sharding)
    modules = manifest.modules
    begin, end = layout.spans().T
    number = layout.table[:, 0]
    values, padding, cells = (np.zeros(len(modules), np.int64) for _ in range(3))
    np.add.at(values, number, end - begin)
    np.add.at(padding, number, -(end - begin) % ALIGNMENT)
    np.add.at(cells, number, 1)
    counted = zip(modules, values.tolist(), padding.tolist(), cells.tolist(), strict=True)
    taken = tuple(_taken(m, sharding, *counts) for m, *counts in counted)
    return Footprint(layout.dtype, layout.n_pages, layout.page_bytes, taken)


def _taken(module: ModuleEntry, sharding: Sharding, *counts: int) -> ModuleFootprint:
    cut = sharding.cut(module.name, module.in_features, module.out_features)
    return ModuleFootprint(module.name, module.rank, cut.in_features, cut.out_features, *counts)


def in_turn(pages: Sequence[int], free: int, slots: int) -> int:
    """How many adapters fit that are of these sizes in turn: the first, the second, …, and the first again.

    Args:
        pages: of each adapter; at least one of them, and at least one page each.
        free: pages of the arena.
        slots: adapters that may be in the arena at once.
    """
    rounds, left = divmod(free, sum(pages))
    count = rounds * len(pages)
    for size in pages:
        if size > left:
            break
        left -= size
        count += 1
    return min(count, slots)


def beyond_tables(taken: Footprint, shape: TableShape) -> str:
    """Why the kernels cannot serve an adapter, so that the reference would; or nothing. As the engine decides it.

    All its modules are served.
    """
    if taken.dtype != shape.dtype:
        return f"is {taken.dtype}, and these tables are for kernels that read {shape.dtype}"
    blocks = max(-(-m.rank // shape.rows[shape.index[m.name]]) for m in taken.modules)
    return "" if blocks <= shape.entries else f"has {blocks} blocks in a module, the tables have {shape.entries}"
