"""`inspect` and `diff`: bars, the part of the base, and two versions side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapterd.cli.modules import bar, norm_ratio
from fakes.commands import Commands
from fakes.packages import write_package

Q0 = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("value", "wanted"), [(None, ""), (0.0, ""), (1e-9, "▏"), (0.5, "█████"), (0.55, "█████▌"), (1.0, "██████████")]
)
def test_a_bar_is_as_long_as_its_value(
    value: float | None, wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bar(value, 1.0, cells=10) == wanted
    assert bar(1.0, 0.0) == ""


def test_inspect_shows_norms_and_how_much_of_the_base_is_adapted(
    shell: Commands, tmp_path: Path, base_file: Path
) -> None:
    folder = write_package(tmp_path / "p", modules=("q_proj", Q0.replace("q_proj", "k_proj"))).directory
    coverage = shell.json("inspect", folder, "--base", base_file)["coverage"]
    assert (coverage["adapted"], coverage["linears"]) == (3, 14)
    kinds = {k["name"]: (k["adapted"], k["of"]) for k in coverage["kinds"]}
    assert (kinds["q_proj"], kinds["k_proj"], kinds["up_proj"]) == ((2, 2), (1, 2), (0, 2))
    shown = shell.run("inspect", folder, "--base", base_file).stdout
    assert "3 of 14 linears" in shown
    (line,) = [line for line in shown.splitlines() if line.strip().startswith(Q0)]
    assert "█" in line
    (part,) = [line for line in shown.splitlines() if line.strip().startswith("k_proj")]
    assert part.split()[1:] == ["1/2", "██████"]
    refused = write_package(tmp_path / "bad", use_dora=True).directory
    assert shell.json("inspect", refused, "--base", base_file, status=6)["coverage"] is None


def test_two_folders_are_compared_module_by_module(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    left = write_package(tmp_path / "a", modules=("q_proj", "v_proj")).directory
    right = write_package(tmp_path / "b", modules=("q_proj", "o_proj"), scale=2.0, alpha=4).directory
    body = shell.json("diff", left, right, "--base", base_file)
    assert (body["left"], body["right"], body["same_files"]) == (str(left), str(right), False)
    by_name = {m["name"].removeprefix("model.layers.0.self_attn."): m for m in body["modules"]}
    assert {n: by_name[n]["change"] for n in ("q_proj", "v_proj", "o_proj")} == {
        "q_proj": "changed",
        "v_proj": "removed",
        "o_proj": "added",
    }
    assert by_name["q_proj"]["fields"]["scaling"] == [2.0, 1.0]
    assert "rank" not in by_name["q_proj"]["fields"]
    assert by_name["o_proj"]["fields"]["rank"] == [None, 4]
    assert by_name["q_proj"]["norm_ratio"] == pytest.approx(
        by_name["q_proj"]["fields"].get("delta_norm", [1, 1])[1] / by_name["q_proj"]["fields"]["delta_norm"][0],
        rel=1e-5,
    )
    shown = shell.run("diff", left, right, "--base", base_file).stdout
    assert "2 → 1" in shown
    assert "removed" in shown


def test_a_version_is_no_different_from_itself_even_without_effect(
    shell: Commands, tmp_path: Path, base_file: Path
) -> None:
    zero = write_package(tmp_path / "zero", scale=0.0).directory
    full = write_package(tmp_path / "full").directory
    same = shell.json("diff", zero, zero, "--base", base_file)
    assert (same["same_files"], same["modules"], same["norm_ratio"]) == (True, [], None)
    grown = shell.json("diff", full, zero, "--base", base_file)
    assert grown["norm_ratio"] == 0.0
    assert {m["norm_ratio"] for m in grown["modules"]} == {0.0}
    assert norm_ratio(0.0, 1.0) is None


def test_what_cannot_be_read_cannot_be_compared(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    good = write_package(tmp_path / "good").directory
    bad = write_package(tmp_path / "bad", use_dora=True).directory
    assert shell.codes("diff", good, bad, "--base", base_file, status=6) == ["UNSUPPORTED_FEATURE"]
    assert shell.codes("diff", good, tmp_path / "nope", "--base", base_file, status=5) == ["PATH_NOT_FOUND"]
    assert shell.run("diff", good, good).exit_code == 2
