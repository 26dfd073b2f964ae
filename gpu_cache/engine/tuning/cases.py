"""What is tuned: a linear in one regime at so many rows and lanes, and the configurations that are tried for it.

The two kernels share nothing but the parts of K, so each is searched alone: a few dozen candidates instead of their
product. What is left out never won in earlier searches on one H200, or does not fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from adapterd.gpu_cache.engine.device_plan import LaunchShape, Regime, list_length
from adapterd.gpu_cache.engine.kernels.configs import Configs, Key, RowsConfig, Rule, TilesConfig, regime_of, tile_rows
from adapterd.gpu_cache.engine.kernels.forms import Form
from adapterd.gpu_cache.engine.kernels.grids import Launch, key_of
from adapterd.gpu_cache.engine.kernels.launch import Launcher
from adapterd.gpu_cache.engine.tuning.workloads import ITEM_BYTES, LEAST_PREFILL, Widths, Workload
from adapterd.gpu_cache.table_shape import MAX_RANK, Matrix, TableShape

PAGE = 1 << 20
LAYER = torch.bfloat16
Config = RowsConfig | TilesConfig


@dataclass(frozen=True, slots=True)
class Case:
    """A workload in one regime."""

    workload: Workload
    regime: Regime

    @property
    def name(self) -> str:
        return f"{self.workload.name}, {self.regime}"

    @property
    def form(self) -> Form:
        return form_of(self.workload.linear)[0]

    @property
    def shape(self) -> LaunchShape:
        """That of its step, but for the length of the list of tiles, on which no kernel depends."""
        blocks = 1 << (self._blocks_of(self.workload.most_rank) - 1).bit_length()
        rows = self.workload.rows
        items = sum(self._blocks_of(self.workload.rank_of(adapter)) for adapter in self.workload.rows_of())
        return LaunchShape(self.regime, rows, self.tile_rows, rows, list_length(items, rows), blocks)

    def _blocks_of(self, rank: int) -> int:
        return self.workload.adapters * -(-rank // self.form.rows)

    @property
    def tile_rows(self) -> int:
        return 1 if self.regime is Regime.ROWS else tile_rows(self.workload.rows)

    @property
    def key(self) -> Key:
        return key_of(self.form, self.shape)

    def by_rule(self) -> Config:
        if self.regime is Regime.ROWS:
            return Rule().rows(self.key, ITEM_BYTES)
        return Rule().tiles(self.key, ITEM_BYTES, batch_invariant=False)

    def launch(self, config: Config, *, pdl: bool, shared_memory: int) -> Launch:
        """What an engine would launch with `config`; nothing of it is on a device."""
        form, entries = form_of(self.workload.linear)
        launcher = Launcher(
            [form], torch.zeros(16, dtype=torch.uint8), LAYER, entries,
            pdl=pdl, shared_memory=shared_memory, tuning=Fixed(config),
        )  # fmt: skip
        return launcher.launch_of(form, self.shape, LAYER, LAYER)


class Fixed(Configs):
    """One configuration, whatever is asked for in its regime; the rule in the other."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def rows(self, key: Key, item_bytes: int) -> RowsConfig:
        return self._config if isinstance(self._config, RowsConfig) else Rule().rows(key, item_bytes)

    def tiles(self, key: Key, item_bytes: int, *, batch_invariant: bool) -> TilesConfig:
        if isinstance(self._config, TilesConfig):
            return self._config
        return Rule().tiles(key, item_bytes, batch_invariant=batch_invariant)


def form_of(widths: Widths) -> tuple[Form, int]:
    """(the form, cells a matrix) of an engine's tables for a layer of these widths alone."""
    matrices = [Matrix(f"p{i}", widths.in_features, width) for i, width in enumerate(widths.parts)]
    shape = TableShape(matrices, 1, MAX_RANK, "BF16", PAGE)
    slices, offset = [], 0
    for width in widths.parts:
        slices.append((offset, width))
        offset += width
    return Form(widths.in_features, widths.out_features, tuple(slices), max(shape.rows)), shape.entries


def cases(linears: Sequence[Widths], rows: Sequence[int], ranks: Sequence[int]) -> list[Case]:
    """Decoding row by row, and in tiles where rows share; prefills in tiles. Tiles first: they gain most.

    Equal keys are tuned once: in tiles, kernels are the same for mixed ranks as for the largest of them.
    """
    found: dict[tuple[Regime, Key], Case] = {}
    for count, rank, linear in product(rows, ranks, linears):
        for case in _regimes(linear, count, rank):
            found.setdefault((case.regime, case.key), case)
    return sorted(found.values(), key=lambda case: case.regime is Regime.ROWS)


def _regimes(linear: Widths, rows: int, rank: int) -> Iterator[Case]:
    if rows >= LEAST_PREFILL:
        yield Case(Workload(linear, rows, "requests", rank), Regime.TILES)
    else:
        yield Case(Workload(linear, rows, "distinct", rank), Regime.ROWS)
        for owners in ("zipf", "one"):  # equal keys: the second is for linears that want tiles for few adapters only
            shared = Workload(linear, rows, owners, rank)
            case = Case(shared, Regime.TILES)
            if regime_of(Case(shared, Regime.ROWS).key, _tiles(shared, case.tile_rows)) is Regime.TILES:
                yield case


def _tiles(workload: Workload, tile_rows: int) -> int:
    return sum(-(-count // tile_rows) for count in Counter(workload.rows_of()).values())


def shrink_candidates(case: Case) -> list[Config]:
    base = case.by_rule()
    if isinstance(base, RowsConfig):
        return [
            replace(base, split=split, block_k=block_k, shrink_warps=warps)
            for split, block_k, warps in product((2, 4, 8), (256, 512, 1024), (4, 8))
            if split * block_k <= case.form.in_features
        ]
    decoding = case.tile_rows == 16
    lanes = _lanes(case, (32, 64) if decoding else (64, 128))
    splits, block_ks = ((2, 4, 8), (128, 256)) if decoding else ((1, 2, 4, 8), (64, 128))
    pairs = ((4, 3),) if decoding else ((4, 3), (4, 4), (8, 3))
    return [
        replace(base, split=split, lanes=lane, block_k=block_k, shrink_warps=warps, shrink_stages=stages)
        for split, lane, block_k, (warps, stages) in product(splits, lanes, block_ks, pairs)
        if split * block_k <= case.form.in_features
    ]


def _lanes(case: Case, sizes: Sequence[int]) -> list[int]:
    """Those of `sizes` that are not larger than all lanes of a row together, and at least one."""
    _, _, slices, rank, _ = case.key
    most = 1 << (slices * rank - 1).bit_length()
    return sorted({max(16, min(size, most)) for size in sizes})


def expand_candidates(case: Case) -> list[Config]:
    base = case.by_rule()
    if isinstance(base, RowsConfig):
        sizes = product((256, 512, 1024), (2, 4, 8))
        return [replace(base, block_n=block_n, expand_warps=warps) for block_n, warps in sizes]
    walks, pairs = (
        ((2, 4, 8), ((4, 2), (4, 3), (2, 2))) if case.tile_rows == 16 else ((4, 8, 16), ((4, 2), (4, 3), (8, 3)))
    )
    widest = max(case.workload.linear.parts)
    return [
        replace(base, block_n=block_n, walk=walk, expand_warps=warps, expand_stages=stages)
        for block_n, walk, (warps, stages) in product((128, 256), walks, pairs)
        if block_n * walk <= widest
    ]
