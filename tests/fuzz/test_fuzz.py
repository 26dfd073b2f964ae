"""A bounded share of the fuzz runs, the attack files, and the fuzzer itself. `make test-all` runs the rest."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapterd.loader.errors import Code
from fuzz import make_attacks, make_corpus
from fuzz.engine import MAX_GROWTH_BYTES, WARM_UP, Report, Watch, corpus, folder, mutations, run_grammar, run_mutations
from fuzz.header import as_input
from fuzz.run import main, run_guided, told
from fuzz.target import Defect, Target, names, target
from strategies.configs import sound_configs
from strategies.headers import sound_headers
from strategies.packages import sound_packages

SEED = 20261101
OUTCOMES = {code.value for code in Code} | {f"stricter {code}" for code in Code}
ACCEPTED = {"accepted", "accepted with warnings"}


def each_attack() -> Iterator[tuple[str, str, str]]:
    for name, found in make_attacks.attacks().items():
        for attack, (_, outcome) in found.items():
            yield name, attack, outcome


@pytest.mark.parametrize(("name", "attack", "outcome"), list(each_attack()))
def test_an_attack_that_was_found_once_has_its_outcome(name: str, attack: str, outcome: str) -> None:
    assert target(name).run((make_attacks.FOLDER / name / attack).read_bytes()) == outcome


def test_stored_files_are_what_their_scripts_write() -> None:
    seeds = {(t, n): data for t, files in make_corpus.seeds().items() for n, data in files.items()}
    assert {(t, p.name): p.read_bytes() for t in names() for p in folder(t).iterdir()} == seeds
    found = {(t, n): data for t, files in make_attacks.attacks().items() for n, (data, _) in files.items()}
    assert {(p.parent.name, p.name): p.read_bytes() for p in make_attacks.FOLDER.glob("*/*")} == found


@pytest.mark.parametrize("name", names())
def test_a_share_of_each_target(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = target(name)
    for report in (run_grammar(chosen, 150, SEED), run_mutations(chosen, 600, SEED)):
        with capsys.disabled():
            print(f"\n{told(report).splitlines()[0]}")
        assert not report.failure, told(report)
        assert report.outcomes.keys() <= OUTCOMES | ACCEPTED | {"no package"}
        assert report.outcomes.keys() & ACCEPTED


@settings(deadline=None, max_examples=50)
@given(sound_headers())
def test_sound_headers_are_accepted(made: object) -> None:
    assert target("header").run(as_input(made)) == "accepted"  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50)
@given(sound_configs())
def test_sound_configs_are_accepted(made: bytes) -> None:
    assert target("config").run(made) in ACCEPTED


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(sound_packages())
def test_sound_packages_are_accepted(made: dict[str, bytes]) -> None:
    from fuzz.package import as_input as as_package

    assert target("package").run(as_package(dict(made))) == "accepted"


def test_every_seed_is_judged() -> None:
    for name in names():
        assert {target(name).run(data) for data in corpus(target(name))} & ACCEPTED, name


def trap(data: bytes) -> str:
    if data.startswith(b"X"):
        raise Defect("starts with X")
    return "accepted"


TRAP = Target("trap", trap, st.binary(max_size=3), ())


def test_a_defect_ends_the_run_and_is_kept() -> None:
    watch = Watch(TRAP, 7, "test")
    assert watch.one(b"a")
    assert not watch.one(b"Xa")
    assert watch.report.failure == "Defect: starts with X"
    assert watch.report.failing == b"Xa"
    assert watch.report.runs == 2


def test_a_slow_input_is_a_defect() -> None:
    def slow(data: bytes) -> str:
        return str(sum(range(len(data) * 3_000_000)))

    watch = Watch(Target("slow", slow, st.binary(), ()), 7, "test", max_seconds=0.01)
    assert watch.one(b"")
    assert not watch.one(b"a")
    assert "s of processor time" in watch.report.failure
    assert watch.report.failing == watch.report.slowest == b"a"


def test_memory_that_grows_is_a_defect() -> None:
    seen: list[bytes] = []

    def hoard(data: bytes) -> str:
        seen.append(data)
        return "accepted"

    watch = Watch(Target("hoard", hoard, st.binary(), ()), 7, "test", peak=lambda: len(seen) << 20)
    for index in range(WARM_UP + (MAX_GROWTH_BYTES >> 20)):
        assert watch.one(b"%d" % index)
    assert not watch.one(b"a")
    assert "memory grew by 193 MiB" in watch.report.failure


def test_a_report_survives_the_way_between_processes() -> None:
    report = run_mutations(target("config"), 20, 3)
    assert Report.from_text(report.as_text()) == report


def test_the_same_seed_gives_the_same_inputs() -> None:
    seeds = [b"abc", b"defg"]
    first, second, third = (list(mutations(seeds, [b"word"], Random(s), 50)) for s in (1, 1, 2))
    assert first == second != third
    assert first[:2] == seeds
    assert run_grammar(target("config"), 30, 5).outcomes == run_grammar(target("config"), 30, 5).outcomes


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_atheris_runs_a_target() -> None:
    report = run_guided("config", 300, 1)
    assert not report.failure, report.failure
    assert report.runs == 300
    assert report.engine == "coverage"


def test_a_process_that_dies_is_a_defect() -> None:
    assert "status" in run_guided("no such target", 1, 1).failure


@pytest.mark.slow
def test_the_command_prints_seeds_and_counts() -> None:
    command = [sys.executable, "-m", "fuzz.run", "--target", "oms", "--runs", "60", "--seed", "5", "--no-atheris"]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    for line in ("oms (grammar): 15 runs", "oms (mutations): 30 runs", "seed 5\n", "seed 6\n"):
        assert line in done.stdout
    assert main  # what `-m` runs
