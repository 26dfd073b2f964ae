"""Workloads say the same rows whenever they are asked, and count their bytes."""

from __future__ import annotations

from collections import Counter

from adapterd.gpu_cache.engine.device_plan import Regime
from adapterd.gpu_cache.engine.tuning.cases import Case
from adapterd.gpu_cache.engine.tuning.workloads import LLAMA_8B, MIXED, Widths, Workload, workloads

Q, QKV = LLAMA_8B[:2]


def test_whose_rows_they_are() -> None:
    distinct, zipf = Workload(Q, 64, "distinct", 16), Workload(Q, 64, "zipf", 16)
    assert sorted(distinct.rows_of()) == list(range(64)) != distinct.rows_of()
    assert zipf.rows_of() == Workload(Q, 64, "zipf", 16).rows_of()
    counts = Counter(zipf.rows_of())
    assert sorted(counts) == list(range(len(counts)))
    assert 20 < len(counts) < 50
    requests = Workload(Q, 2048, "requests", 0).rows_of()
    assert requests == sorted(requests)
    assert set(Counter(requests).values()) == {256}


def test_the_fewest_bytes() -> None:
    assert Workload(Widths("w", 8, (4, 2)), 2, "distinct", 3).nbytes() == 2 * (2 * 8 + 6 * (8 * 2 + 6) + 2 * 2 * 6)
    mixed = Workload(QKV, 2048, "requests", 0)
    assert mixed.most_rank == max(MIXED)
    ranks = 2 * sum(MIXED)
    assert mixed.nbytes() == 2 * (2048 * 4096 + ranks * (4096 * 3 + 6144) + 2 * 2048 * 6144)


def test_what_the_bench_times() -> None:
    names = [one.name for one in workloads()]
    assert len(names) == len(set(names)) == 4 * (2 * 2 + 2) * 3
    for name in (
        "q T64 distinct r16",
        "qkv T256 zipf rmixed",
        "gate_up T2048 requests r64",
        "down T8192 requests rmixed",
    ):
        assert name in names
    assert [one.rows for one in workloads([Q], [7], [1])] == [7, 7]


def test_compositions_of_k_adapters_read_what_one_of_the_summed_rank_reads() -> None:
    composed, alone = Workload(QKV, 64, "distinct", 16, 3), Workload(QKV, 64, "distinct", 48)
    assert composed.name == "qkv T64 distinct 3×r16"
    assert composed.nbytes() == alone.nbytes()
    assert Case(composed, Regime.ROWS).shape == Case(alone, Regime.ROWS).shape
    assert Case(composed, Regime.ROWS).shape.blocks == 4  # three, and a power of two
