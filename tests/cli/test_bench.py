"""`adapterctl bench kernels` where there is no card, misused, and what it prints of what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapterd.cli.boundary import schema_of
from adapterd.cli.output import Report, print_report
from fakes.commands import Commands

torch = pytest.importorskip("torch")
no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a card")


@no_card
@pytest.mark.parametrize("device", ["cuda:0", "cpu", "cuda:99", "tpu"])
def test_without_a_card_it_says_so(shell: Commands, device: str, tmp_path: Path) -> None:
    for words in ([], ["--tune", "--out", tmp_path / "t.json"], ["--batch-invariant"]):
        body = shell.json("bench", "kernels", "--device", device, *words, status=8)
        assert body["problems"][0]["code"] == "DEVICE_ERROR"
        assert body["problems"][0]["where"] == device
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--tune"], ["--out", "t.json"], ["--tune", "--out", "t.json", "--batch-invariant"],
        ["--tune", "--out", "t.json", "--tuning", "t"], ["--linear", "4096"], ["--linear", "4096:"],
        ["--linear", "4096:0"], ["--linear", "0:4096"], ["--linear", "4096:4096,"], ["--linear", "4096:-1"],
        ["--linear", "9999999:16"], ["--linear", "4096:" + "16," * 8 + "16"], ["--linear", "٤:16"],
        ["--linear", "q"], ["--rows", "0"], ["--rows", "16385"], ["--rank", "0"], ["--rank", "129"],
        ["--rank", "some"], ["--minutes", "0"], ["--minutes", "nan"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_words_that_mean_nothing(shell: Commands, words: list[str]) -> None:
    body = shell.json("bench", "kernels", *words, status=2)
    assert body["problems"][0]["code"] == "REQUEST_INVALID"


def test_where_a_table_cannot_be_made_no_time_is_spent(shell: Commands, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    body = shell.json("bench", "kernels", "--tune", "--out", taken, status=7)
    assert body["problems"][0]["code"] == "ALREADY_EXISTS"
    assert taken.read_text() == "mine"
    shell.json("bench", "kernels", "--tune", "--out", tmp_path / "none" / "t.json", status=5)


def printed(report: Report, capsys: pytest.CaptureFixture[str], *, as_json: bool = False) -> str:
    print_report(report, schema_of("bench.kernels"), as_json=as_json, quiet=False)
    return capsys.readouterr().out


def test_times_are_told_apart_from_the_cold_start(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    from adapterd.cli.bench.running import DEFAULT_MODE, _bench_report
    from adapterd.gpu_cache.engine.tuning.machine import Machine
    from adapterd.gpu_cache.engine.tuning.measuring import Measured
    from adapterd.gpu_cache.engine.tuning.workloads import LLAMA_8B, Workload

    machine = Machine("cuda:0", "NVIDIA H200", (9, 0), "2", "3")
    one = Measured(Workload(LLAMA_8B[0], 64, "zipf", 0), 7.5, 5.0, 80.0, 25.0, 3.25, 1e-4, "rows", {"split": 4})
    report = _bench_report(machine, 4.27e12, [(DEFAULT_MODE, one)], [])
    text = printed(report, capsys)
    for word in ("q T64 zipf rmixed", "7.5", "5.0", "1.50", "split=4", "4.27 TB/s", "3.2 s for the first steps"):
        assert word in text
    body = json.loads(printed(report, capsys, as_json=True))
    assert body["cold_seconds"] == 3.25
    assert body["rows"][0]["us"] == 7.5
    assert body["rows"][0]["config"] == {"split": 4}
    assert body["machine"]["table"] == "nvidia-h200.json"


def test_a_search_says_what_it_passed_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from adapterd.cli.bench.running import _tune_report
    from adapterd.gpu_cache.engine.kernels.configs import RowsConfig
    from adapterd.gpu_cache.engine.kernels.tuned import Entry, Table
    from adapterd.gpu_cache.engine.tuning.face import Tuning
    from adapterd.gpu_cache.engine.tuning.machine import Machine
    from adapterd.gpu_cache.engine.tuning.search import Tally

    entry = Entry((4096, 4096, 1, 16, 64), 2, RowsConfig(2, 256, 4, 512, 4), 7.0, 8.0)
    table = Table("NVIDIA H200", "2", "3", (entry,))
    done = Tuning(table, Tally(timed=31, wrong=2, left_out=["down T64"]), 40, 12.0)
    text = printed(_tune_report(Machine("cuda:0", "NVIDIA H200", (9, 0), "2", "3"), done, tmp_path / "t"), capsys)
    for word in ("31", "down T64", "block_n=512", "7.0", "8.0"):
        assert word in text
