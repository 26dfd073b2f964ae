"""The demo: it runs, it says so, and it says so only when everything held."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from adapterd.cli.demo.attacks import Attack
from adapterd.cli.demo.report import demo_report
from adapterd.cli.demo.serving import LoadTime, RowResult, Served
from fakes.commands import Commands

ROOM = Path(__file__).resolve().parents[2] / "cli" / "demo"


def test_the_main_job_runs_and_every_attack_is_refused(tmp_path: Path) -> None:
    told = Commands(tmp_path).json("demo")
    assert told["schema"] == "adapterctl.demo/1" and told["wrong"] == []
    assert [row["label"] for row in told["rows"]].count("base") == 2
    assert all(row["equal"] for row in told["rows"]) and all(attack["held"] for attack in told["attacks"])
    assert len(told["attacks"]) == 6 and len(told["loads"]) == 3


@pytest.mark.parametrize("broken", ["row", "attack"])
def test_anything_that_differs_makes_it_fail(broken: str) -> None:
    row = RowResult("acme/finance", 6, 0.5, broken != "row", "float64, merged weights")
    attack = Attack("a flipped byte", "worker", "HASH_MISMATCH", "loaded" if broken == "attack" else "HASH_MISMATCH")
    served = Served((row,), (LoadTime("acme/finance:prod", 0.1, 0.001),), "reference:torch", 1)
    report = demo_report(served, [attack], "cpu", 1.0)
    assert report.status == 1 and len(report.body["wrong"]) == 1  # type: ignore[arg-type]


def test_the_reference_shares_nothing_with_the_engine() -> None:
    tree = ast.parse((ROOM / "reference.py").read_text())
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert names and not [n for n in names if n.startswith(("adapterd", "."))]


def test_a_folder_to_keep_must_not_be_there_yet(tmp_path: Path) -> None:
    assert Commands(tmp_path).codes("demo", "--keep", tmp_path, status=7) == ["ALREADY_EXISTS"]
