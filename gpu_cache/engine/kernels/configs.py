"""Launch configurations: what they are, and the rule for shapes that no table has (`tuned`).

The rule holds what the best configurations on one H200 had in common, for bf16 and the linears of an 8B Llama. Where it
goes beyond them it is a guess, which `adapterctl bench kernels --tune` replaces by a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from adapterd.gpu_cache.engine.device_plan import Regime


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
"""(in_features, out_features, slices, rank lanes a slice, rows); `launch.key_of` says which lanes."""

LANES_KEPT = 128
"""Lanes of h that stay in registers; compositions of more rank read h again for every column tile."""
ENOUGH_PROGRAMS = 256
"""Of a kernel, so that a large card is full: about two for each of the 132 multiprocessors of an H200."""
DEEP = 8192
"""From this in_features on, K is split further."""
MOST_PARTS, LEAST_PART = 16, 512
"""How far `spread` splits K, and the elements of a part down to which it does."""


class Configs(Protocol):
    """Where a launcher's configurations come from. Any of them gives right results for any shape.

    Args of both: item_bytes, of the wider of x and the adapter.
    """

    def rows(self, key: Key, item_bytes: int) -> RowsConfig: ...

    def tiles(self, key: Key, item_bytes: int, *, batch_invariant: bool) -> TilesConfig:
        """batch_invariant: neither the parts of K nor a step of it may depend on the number of rows."""


class Rule:
    """Without a table."""

    def rows(self, key: Key, item_bytes: int) -> RowsConfig:
        k, _, _, rank, _ = key
        deep = k > DEEP
        split = 8 if deep else 4 if k >= 2048 else 1
        few = rank <= 16
        config = RowsConfig(split, 256 if deep else 1024, 8, 1024 if few else 512, 4 if few else 2)
        if item_bytes > 2:
            config = replace(config, block_k=min(config.block_k, 512), block_n=config.block_n // 2)
        return replace(config, block_k=whole_blocks(k, split, config.block_k))

    def tiles(self, key: Key, item_bytes: int, *, batch_invariant: bool) -> TilesConfig:
        k, out_features, slices, rank, rows = key
        lanes = max(16, min(64, 1 << (slices * rank - 1).bit_length()))
        if rows > 512:
            split = _split(key, lanes)
            walk = _walk(rows, out_features, 128)
            config = TilesConfig(split, lanes, 128, 4, 3, 128, walk, 4 if rank <= 64 else 8, 3)
        else:
            config = TilesConfig(4, min(lanes, 32), 256 if rank <= 32 else 128, 4, 3, 128, 4, 4, 2)
        if item_bytes > 2:
            config = replace(
                config, lanes=min(config.lanes, 32), block_k=64, shrink_stages=2, block_n=64, expand_stages=2
            )
        if batch_invariant:
            config = replace(config, split=8 if k > DEEP else 4, block_k=128 if item_bytes == 2 else 64)
        split = config.split if k >= 1024 else 1
        return replace(config, split=split, block_k=whole_blocks(k, split, config.block_k))


def _split(key: Key, lanes: int) -> int:
    """The fewest parts, up to 8, for enough programs of `shrink`: `expand` reads each part's plane again a strip."""
    _, _, slices, rank, rows = key
    programs = -(-rows // tile_rows(rows)) * -(-slices * rank // lanes)
    split = 1
    while split < 8 and programs * split < ENOUGH_PROGRAMS:
        split *= 2
    return split


def spread(config: TilesConfig, key: Key, groups: int) -> TilesConfig:
    """`config`, with K in more parts where so few tiles would leave half of a large card without work.

    Args:
        groups: tiles that share `config`'s work; 0 if the shape does not say, and `config` is right as it is.
    """
    k, _, slices, rank, _ = key
    split, programs = config.split, groups * -(-slices * rank // config.lanes)
    if not 0 < 2 * programs * split <= ENOUGH_PROGRAMS:
        return config
    while 2 * split <= MOST_PARTS and k >= 2 * split * LEAST_PART:
        split *= 2
    return replace(config, split=split, block_k=whole_blocks(k, split, config.block_k))


def _walk(rows: int, out_features: int, block_n: int) -> int:
    """The longest walk of 16, 8 and 4 for enough programs of `expand`: each sums h once."""
    tiles = -(-rows // tile_rows(rows))
    return next((walk for walk in (16, 8) if tiles * out_features >= ENOUGH_PROGRAMS * walk * block_n), 4)


def whole_blocks(k: int, split: int, most: int) -> int:
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


def one_stage(config: RowsConfig | TilesConfig, item_bytes: int, rows: int) -> Iterator[int]:
    """Bytes of shared memory that a step of each kernel takes; a launcher has as many stages of it as find room.

    Args:
        rows: of a tile.
    """
    if isinstance(config, TilesConfig):
        yield item_bytes * config.block_k * (config.lanes + rows)
        yield item_bytes * config.block_n * (LANES_KEPT + rows)


SAVED_BY_TILES, SAVED_BY_A_TILE = 14_000_000, 200_000
"""Elements of adapters that a linear must save by tiles, and more for each tile, or rows one by one are faster.

On one H200 (bf16) tiles cost 5.5 µs, and 0.08 µs for each of them; the L2 gave 2.5 elements a nanosecond.
"""


def regime_of(key: Key, groups: int) -> Regime:
    """How a linear works on a step that has the lists of both regimes.

    Rows one by one read an adapter again for each of its rows, from the L2; tiles read it once for a tile, and
    cost sorting, masks and a second pass over h. So it is what is read again that decides.

    Args:
        groups: tiles of the step, at most; at least as many as compositions.
    """
    in_features, out_features, slices, rank, rows = key
    saved = (rows - groups) * rank * (slices * in_features + out_features)
    return Regime.TILES if saved > SAVED_BY_TILES + SAVED_BY_A_TILE * groups else Regime.ROWS
