"""Launch configurations: what was measured as data, and a rule for the rest.

All of it was found on one H200 (bf16, Llama-8B widths); the rule holds what its best configurations have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """Of the regime of rows.

    Attributes:
        split: parts of K.
        block_k, shrink_warps: elements of K a step of `shrink`.
        block_n, expand_warps: columns of a program of `expand`.
    """

    split: int
    block_k: int
    shrink_warps: int
    block_n: int
    expand_warps: int


@dataclass(frozen=True, slots=True)
class TilesConfig:
    """Of the regime of tiles.

    Attributes:
        split: parts of K.
        lanes: rank lanes, over all slices, of a program of `shrink`.
        block_k, shrink_warps, shrink_stages: of `shrink`.
        block_n, walk, expand_warps, expand_stages: `expand` walks `walk` tiles of `block_n` columns.
    """

    split: int
    lanes: int
    block_k: int
    shrink_warps: int
    shrink_stages: int
    block_n: int
    walk: int
    expand_warps: int
    expand_stages: int


Key = tuple[int, int, int, int, int]
"""(in_features, out_features, slices, rank lanes a slice, rows)."""

MEASURED_TILES: Mapping[Key, TilesConfig] = {
    (4096, 28672, 2, 64, 8192): TilesConfig(2, 64, 128, 4, 3, 128, 16, 4, 3),
    (4096, 28672, 2, 16, 8192): TilesConfig(2, 32, 128, 4, 3, 128, 16, 4, 3),
}
MEASURED_ROWS: Mapping[Key, RowsConfig] = {}

DEEP = 8192
"""From this in_features on, K is split further."""


def rows_config(key: Key, item_bytes: int) -> RowsConfig:
    """Args: item_bytes: of the wider of x and the adapter."""
    if key in MEASURED_ROWS:
        return MEASURED_ROWS[key]
    k, _, _, rank, _ = key
    deep = k > DEEP
    split = 8 if deep else 4 if k >= 2048 else 1
    few = rank <= 16
    config = RowsConfig(split, 256 if deep else 1024, 8, 1024 if few else 512, 4 if few else 2)
    if item_bytes > 2:
        config = replace(config, block_k=min(config.block_k, 512), block_n=config.block_n // 2)
    return replace(config, block_k=_block_k(k, split, config.block_k))


def tiles_config(key: Key, item_bytes: int, *, batch_invariant: bool) -> TilesConfig:
    """Args: batch_invariant: the parts of K must not depend on the number of rows."""
    k, _, slices, rank, rows = key
    if not batch_invariant and key in MEASURED_TILES:
        return MEASURED_TILES[key]
    lanes = max(16, min(64, 1 << (slices * rank - 1).bit_length()))
    split = 4 if batch_invariant else 2 if rows >= 4096 else 8 if rows > 512 else 4
    if k < 1024:
        split = 1
    if rows > 512:
        config = TilesConfig(split, lanes, 128, 4, 3, 128, 8, 4 if rank <= 64 else 8, 3)
    else:
        config = TilesConfig(split, min(lanes, 32), 256 if rank <= 32 else 128, 4, 3, 128, 4, 4, 2)
    if item_bytes > 2:
        config = replace(config, lanes=min(config.lanes, 32), block_k=64, shrink_stages=2, block_n=64, expand_stages=2)
    if batch_invariant:
        config = replace(config, block_k=64)
    return replace(config, block_k=_block_k(k, split, config.block_k))


def _block_k(k: int, split: int, most: int) -> int:
    """The largest power of two up to `most` that divides a part of K; `most`, cut to K, if none from 32 does."""
    part = k // split if k % split == 0 else 0
    size = most
    while size >= 32:
        if part and part % size == 0:
            return size
        size //= 2
    return max(16, min(most, 1 << (-(-k // split) - 1).bit_length()))


def tile_rows(rows: int) -> int:
    """Rows of a tile for a step of `rows` rows."""
    return 64 if rows > 512 else 16
