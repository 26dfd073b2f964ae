"""A few mutants with every run of the suite, a share of all with `make test-all`; and how they are judged."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mutations.judge import Verdict, _Child
from mutations.run import ALWAYS, order, shared_out
from mutations.sites import ROOT, Mutant, find_all

SAMPLE = 6
MUTANTS = find_all()
NOTE = next(m for m in MUTANTS if m.function == "Readers.note" and m.kind == "count")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    environment = {k: v for k, v in environment.items() if not k.startswith(("PYTEST", "COV"))}
    return subprocess.run(
        [sys.executable, "-m", "mutations.run", *arguments],
        capture_output=True, text=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip


def judged(mutant: Mutant) -> Verdict:
    """By no test at all."""
    child = _Child(mutant, [])
    while not child.step({}):
        pass
    return child.verdict()


def test_a_sample_of_mutants_is_caught() -> None:
    """Of those that let others' bytes be served. Drawn by the sources: another one whenever the package changes."""
    done = run("--sample", str(SAMPLE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"mutants: {SAMPLE}" in done.stdout
    assert "survived: 0" in done.stdout


@pytest.mark.parametrize("arguments", [("--match", "no such text"), ("--match", "no such text", "--sample", "3")])
def test_finding_nothing_is_a_failure(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "no mutant matches" in done.stderr


def test_what_cannot_be_put_into_place_is_not_taken_for_caught() -> None:
    broken = Mutant(NOTE.path, NOTE.function, NOTE.line, "count", "drop", NOTE.before, "((", NOTE.span)
    verdict = judged(broken)
    assert (verdict.outcome, verdict.why.partition(":")[0]) == ("broken", "SyntaxError")


def test_what_no_test_calls_survives() -> None:
    verdict = judged(NOTE)
    assert (verdict.outcome, verdict.why) == ("survived", "no test calls the function")


def test_a_share_has_all_that_matter_most_and_a_larger_one_has_the_smaller_one() -> None:
    small, large = set(shared_out(MUTANTS, 10, 1)), set(shared_out(MUTANTS, 30, 1))
    assert small < large < set(MUTANTS)
    assert {m for m in MUTANTS if m.kind in ALWAYS} <= small
    assert small != set(shared_out(MUTANTS, 10, 2))
    assert shared_out(MUTANTS, 100, 1) == MUTANTS


def test_the_mirror_goes_first_and_state_machines_last() -> None:
    room = "tests/gpu_cache"
    seconds = {
        f"{room}/test_machines.py::TestCache::runTest": 9.0, f"{room}/host/test_pool.py::a": 0.1,
        f"{room}/test_slots.py::b": 0.2, f"{room}/test_slots.py::a": 0.1,
        f"{room}/test_fences.py::slow": 3.0, f"{room}/test_fences.py::fast": 1.0,
        f"{room}/engine/test_engine.py::a": 0.1,
    }  # fmt: skip
    assert [t.removeprefix(f"{room}/") for t in order(NOTE, list(seconds), seconds)] == [
        "test_fences.py::fast", "test_fences.py::slow", "test_slots.py::a", "test_slots.py::b",
        "host/test_pool.py::a", "test_machines.py::TestCache::runTest",
    ]  # fmt: skip
