"""A few mutants with every run of the suite; `make test-all` has them all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mutations.sites import ROOT

SAMPLE = 6


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    environment = {k: v for k, v in environment.items() if not k.startswith(("PYTEST", "COV"))}
    return subprocess.run(
        [sys.executable, "-m", "mutations.run", *arguments],
        capture_output=True, text=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip


def test_a_sample_of_mutants_is_caught() -> None:
    """Drawn by the sources themselves: another one whenever the package changes."""
    done = run("--sample", str(SAMPLE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"mutants: {SAMPLE}" in done.stdout
    assert "survived: 0" in done.stdout


@pytest.mark.parametrize("arguments", [("--match", "no such text"), ("--match", "no such text", "--sample", "3")])
def test_finding_nothing_is_a_failure(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "no mutant matches" in done.stderr
