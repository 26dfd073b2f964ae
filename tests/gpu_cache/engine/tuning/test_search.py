"""The search over formulas: it finds the best pair, counts what it passes over, and writes only what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

pytest.importorskip("triton")

from adapterd.gpu_cache.engine.device_plan import Regime
from adapterd.gpu_cache.engine.kernels.configs import RowsConfig, TilesConfig
from adapterd.gpu_cache.engine.kernels.tuned import Entry, Table, parse
from adapterd.gpu_cache.engine.tuning.cases import Case, Config, cases, expand_candidates, shrink_candidates
from adapterd.gpu_cache.engine.tuning.search import Card, Search
from adapterd.gpu_cache.engine.tuning.stand import NoStandError
from adapterd.gpu_cache.engine.tuning.workloads import LLAMA_8B, Workload
from fakes.tuning import FormulaCard, FormulaCompilers

ALL = cases(LLAMA_8B, (64, 256, 2048, 8192), (16, 64))
PREFILL = Case(Workload(LLAMA_8B[2], 2048, "requests", 64), Regime.TILES)
DECODE = Case(Workload(LLAMA_8B[0], 64, "distinct", 16), Regime.ROWS)


def off(value: int, best: int) -> float:
    return abs(math.log2(value / best))


def shrink_cost(config: Config) -> float:
    cost = 10 + off(config.split, 2) + off(config.block_k, 64) + off(config.shrink_warps, 8)
    return cost + (off(config.lanes, 128) if isinstance(config, TilesConfig) else 0)


def expand_cost(config: Config) -> float:
    cost = 10 + off(config.block_n, 256) + off(config.expand_warps, 8)
    return cost + (off(config.walk, 16) if isinstance(config, TilesConfig) else 0)


def search(card: FormulaCard, compilers: FormulaCompilers | None = None, *, minutes: float = math.inf) -> Search:
    """`minutes`: as many questions of the clock until time is up."""
    left: Iterator[int] = iter(range(10**9))
    return Search(
        Card(pdl=True, shared_memory=227 << 10), compilers or FormulaCompilers(), lambda _: card,
        out_of_time=lambda: next(left) >= minutes, progress=lambda _: None,
    )  # fmt: skip


def test_the_best_pair_is_found() -> None:
    (entry,) = search(FormulaCard(shrink_cost, expand_cost)).run([PREFILL])
    config = entry.config
    assert isinstance(config, TilesConfig)
    assert (config.split, config.block_k, config.shrink_warps, config.lanes) == (2, 64, 8, 128)
    assert (config.block_n, config.expand_warps, config.walk) == (256, 8, 16)
    assert (entry.key, entry.us) == ((4096, 28672, 2, 64, 2048), 20.0)
    rule = PREFILL.by_rule()
    assert entry.rule_us == shrink_cost(rule) + expand_cost(rule) > entry.us


def test_rows_are_searched_the_same_way() -> None:
    (entry,) = search(FormulaCard(shrink_cost, expand_cost)).run([DECODE])
    assert isinstance(entry.config, RowsConfig)
    assert (entry.config.split, entry.config.block_n, entry.config.expand_warps) == (2, 256, 8)


def test_the_rules_configuration_is_the_entry_unless_it_is_beaten_by_more_than_noise() -> None:
    one = search(FormulaCard(lambda _: 10.0, lambda _: 10.0))
    assert [entry.config for entry in one.run([PREFILL])] == [PREFILL.by_rule()]
    assert one.tally.rule_is_best == 1
    slight = search(FormulaCard(lambda _: 10.0, lambda c: 9.9 if c.block_n == 256 else 10.0))
    (entry,) = slight.run([PREFILL])
    assert (entry.config, entry.us, entry.rule_us) == (PREFILL.by_rule(), 20.0, 20.0)


def test_what_is_wrong_or_does_not_run_is_passed_over_and_counted() -> None:
    card = FormulaCard(shrink_cost, expand_cost, wrong=lambda c: c.split == 2, breaks=lambda c: c.block_n == 256)
    compilers = FormulaCompilers(
        refuses=lambda job: job.kernel == "shrink_tiles" and job.constants["num_warps"] == 8,
        shared_memory=lambda job: (228 << 10) if job.constants.get("LANES") == 128 else 1024,
    )
    one = search(card, compilers)
    (entry,) = one.run([PREFILL])
    config = entry.config
    assert isinstance(config, TilesConfig)
    assert (config.split in (1, 4), config.block_n, config.shrink_warps, config.lanes) == (True, 128, 4, 64)
    assert not [c for c in card.timed if c.split == 2 or c.block_n == 256]
    tally = one.tally
    assert min(tally.wrong, tally.failed, tally.not_compiled, tally.too_much_shared_memory, tally.timed) > 0


def test_without_time_nothing_is_made_up() -> None:
    none = search(FormulaCard(shrink_cost, expand_cost), minutes=0)
    assert list(none.run([PREFILL, DECODE])) == []
    assert none.tally.left_out == [PREFILL.name, DECODE.name]
    card = FormulaCard(shrink_cost, expand_cost)
    short = search(card, minutes=20)
    found = list(short.run([PREFILL, DECODE]))
    assert short.tally.left_out == [DECODE.name]
    assert all(entry.config in card.timed for entry in found)


def test_a_case_that_cannot_stand_is_left_out() -> None:
    def stand(_: Case) -> FormulaCard:
        raise NoStandError("more than the card's free memory")

    one = Search(Card(True, 227 << 10), FormulaCompilers(), stand, lambda: False, lambda _: None)
    assert list(one.run([PREFILL])) == []
    assert one.tally.left_out == ["more than the card's free memory"]


def test_every_candidate_may_stand_in_a_table() -> None:
    """What a search can find, a table can hold: the limits of a file and the spaces agree."""
    for case in ALL:
        for config in [*shrink_candidates(case), *expand_candidates(case)]:
            one = Table("x", "", "", (Entry(case.key, 2, config, 1.0, 2.0),))
            assert parse(one.text().encode(), "t") == one


def test_cases_are_each_key_once_and_tiles_come_first() -> None:
    keys = [(case.regime, case.key) for case in ALL]
    assert len(set(keys)) == len(keys)
    regimes = [case.regime for case in ALL]
    assert regimes == sorted(regimes, key=lambda regime: regime is Regime.ROWS)
    assert cases(LLAMA_8B, (2048,), (64, 0)) == cases(LLAMA_8B, (2048,), (64,))  # tiles are as wide as the largest
    alone = [case.key for case in cases(LLAMA_8B, (64,), (64, 0)) if case.regime is Regime.ROWS]
    assert sorted({lanes for _, _, _, lanes, _ in alone}) == [32, 64]  # rows go by their mean
    assert all(20 <= len(shrink_candidates(c)) + len(expand_candidates(c)) <= 70 for c in ALL)
