"""The page about peers: goals are judged by the worst workload, and a lost one is told."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers import goals, plot, read, table

HEADER = {"kind": "header", "device": "a card", "torch": "2", "copy_Bps": 4e12}


def lines(tmp_path: Path, **peers: dict[str, object]) -> Path:
    record = {
        "kind": "kernel", "wl": "decode/qo/T64/aall/r16", "phase": "decode", "shape": "qo", "T": 64, "dist": "all",
        "rank": "16", "floor_us": 4.0, "peers": peers,
    }  # fmt: skip
    path = tmp_path / "kernels-a.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (HEADER, record)))
    return path


def test_goals_are_judged_against_the_best_peer_and_the_floor(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        project={"graph_us": 8.0, "eager_us": 50.0},
        slow={"graph_us": 40.0},
        sglang_v2={"graph_us": 10.0},
        sketch={"graph_us": 1.0},
    )
    _, found = read(path)
    rows = [goal.row(found) for goal in goals()]
    assert "| E1 | qo T64 distinct r16, over the floor | ≤ 1.8 | 0 of 1 | 2.00 (qo T64 distinct r16) |" in rows
    assert "| E2 | distinct r16 T64, over the best peer | ≥ 1.5 | 0 of 1 | 1.25 (qo T64 distinct r16) |" in rows
    assert any("not measured" in row for row in rows)


def test_a_workload_that_loses_and_one_that_is_wrong_are_told(tmp_path: Path) -> None:
    path = lines(tmp_path, project={"graph_us": 8.0}, sglang_v2={"graph_us": 6.0}, vllm={"rel_err": 0.5})
    header, found = read(path)
    page = table(header, found, [path.name])
    assert "**0.75×**, slower than SGLang triton_v2" in page
    assert "- qo T64 distinct r16, vLLM: off by 0.5" in page
    assert "Faster than the best peer in 0 of 1 workloads" in page
    assert plot(found).count('<path class="grid" d="M240') >= 1
