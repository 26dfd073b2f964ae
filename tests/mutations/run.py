"""Changes the cache in one place at a time and sees whether a test notices: `python -m mutations.run` in tests/.

Exit status: 0 every mutant was caught, 1 some survived, 2 the tests fail without a mutant or nothing was found, or
sources changed meanwhile. With `--tolerate` some of those that matter less may survive; none of the others.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from mutations.equivalent import excluded
from mutations.install import place
from mutations.judge import Judge, Verdict
from mutations.sites import PACKAGE, ROOT, Mutant, changed, find_all

TESTS = ROOT / "tests" / "gpu_cache"
CAUGHT_BY = Path(__file__).parent / "caught_by.json"
ALWAYS = ("currency", "port")
"""The kinds that matter most: others' bytes would be served."""
APART = ("gpu_cache/engine/", "gpu_cache/host/process/", "gpu_cache/daemon/")
"""Rooms whose tests judge their own mutants only, and which no other tests judge: they are slow, or start processes."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    mutants = [m for m in find_all() if excluded(m) is None and _matches(m, options.match)]
    seed = options.seed or fingerprint()
    if options.share < 100:
        mutants = shared_out(mutants, options.share, seed)
        print(f"{len(mutants)} mutants: all of {' and '.join(ALWAYS)}, {options.share} % of the others, seed {seed}")
    if options.sample:
        mutants = [m for m in mutants if m.kind in ALWAYS]
        print(f"a sample of {options.sample} out of {len(mutants)} mutants of {' and '.join(ALWAYS)}, seed {seed}")
        mutants = sorted(random.Random(seed).sample(mutants, min(options.sample, len(mutants))), key=lambda m: m.name)
    if options.list:
        for mutant in mutants:
            print(_line(mutant))
        return 0
    if not mutants:
        print("no mutant matches", file=sys.stderr)
        return 2
    judged = judge(mutants, options.jobs, options.verbose, measured=not options.sample)
    if options.remember:
        remember(judged.verdicts)
    return _report(judged, options.tolerate)


def known() -> dict[str, list[str]]:
    """Which tests have caught mutants of which function. It only says where to begin, and may be out of date."""
    return json.loads(CAUGHT_BY.read_text()) if CAUGHT_BY.exists() else {}


def remember(verdicts: Sequence[Verdict]) -> None:
    """Adds to `known`; what is said of a function that was judged now takes the place of what was said before."""
    found: dict[str, set[str]] = {}
    for verdict in verdicts:
        if verdict.outcome == "caught":
            found.setdefault(place(verdict.mutant), set()).add(verdict.test)
    every = {place(m) for m in find_all()}
    merged = {k: v for k, v in known().items() if k in every} | {k: sorted(v) for k, v in found.items()}
    CAUGHT_BY.write_text(json.dumps(dict(sorted(merged.items())), indent=1) + "\n")


def shared_out(mutants: Sequence[Mutant], percent: int, seed: int) -> list[Mutant]:
    """All that matter most, and that share of the others. A larger share holds what a smaller one does."""
    others = [m for m in mutants if m.kind not in ALWAYS]
    random.Random(seed).shuffle(others)
    chosen = set(others[: -(-len(others) * percent // 100)])
    return [m for m in mutants if m.kind in ALWAYS or m in chosen]


def judge(mutants: Sequence[Mutant], jobs: int, verbose: bool = False, *, measured: bool = True) -> Judge:
    """The verdict on each mutant. Imports torch and all tests once, then forks.

    Args:
        measured: first all tests run without a mutant: how long each takes and what it calls. It takes as long as
            they do, and pays with more than some ten mutants.
    """
    began = time.monotonic()

    def told(verdict: Verdict) -> None:
        done = len(plugin.verdicts)
        if verbose or verdict.outcome != "caught":
            print(f"[{done}/{len(mutants)} {time.monotonic() - began:.0f} s] {_told(verdict)}", flush=True)

    plugin = Judge(mutants, order, jobs, told, known(), measured)
    folders = [str(TESTS)]
    for room in APART:
        if not any(m.path.startswith(room) for m in mutants):
            folders.append(f"--ignore={ROOT / 'tests' / room}")
    pytest.main(
        [*folders, f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml"), "-q", "-q", "--no-header", "--no-summary",
         "-p", "no:cacheprovider", "-p", "no:xdist", "-s", "-m", "not slow and not gpu"],
        plugins=[plugin],
    )  # fmt: skip
    return plugin


def order(mutant: Mutant, tests: Sequence[str], seconds: dict[str, float]) -> list[str]:
    """The mirror of the file first, then its room, then all others, each by speed; state machines last."""
    judges = [t for t in tests if _apart(f"tests/{mutant.path}") == _apart(t)]
    room, _, name = mutant.path.rpartition("/")
    mirror = f"tests/{room}/test_{name}::"

    def key(test: str) -> tuple[bool, bool, bool, float]:
        here = test.rpartition("::")[0].partition("::")[0].rpartition("/")[0] == f"tests/{room}"
        return test.endswith("::runTest"), not test.startswith(mirror), not here, seconds.get(test, 0.0)

    return sorted(judges, key=key)


def _apart(path: str) -> str:
    return next((room for room in APART if path.startswith(f"tests/{room}")), "")


def _matches(mutant: Mutant, texts: Sequence[str] | None) -> bool:
    return not texts or any(text in f"{mutant.name} {mutant.function} {mutant.before}" for text in texts)


def fingerprint() -> int:
    """A seed that changes when the package does, so that a sample is the same until then and another one after."""
    digest = sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:4])


def _report(judge: Judge, tolerated: int = 0) -> int:
    meanwhile = changed()
    if meanwhile:
        print(f"changed while the tests ran, so nothing is known: {', '.join(meanwhile)}", file=sys.stderr)
        return 2
    if judge.broken:
        print(f"without a mutant there is a failure already: {judge.broken}", file=sys.stderr)
        return 2
    if len(judge.verdicts) < len(judge.mutants):
        print(f"only {len(judge.verdicts)} of {len(judge.mutants)} mutants were judged", file=sys.stderr)
        return 2
    verdicts = sorted(judge.verdicts, key=lambda v: (v.mutant.path, v.mutant.span, v.mutant.operator))
    for verdict in verdicts:
        print(_told(verdict))
    outcomes = Counter(v.outcome for v in verdicts)
    kinds = Counter(v.mutant.kind for v in verdicts)
    print(f"mutants: {len(verdicts)} ({', '.join(f'{n} {k}' for k, n in sorted(kinds.items()))})")
    print(f"caught: {outcomes['caught'] + outcomes['hung']} ({outcomes['hung']} by a test that hangs)")
    print(f"survived: {outcomes['survived']}")
    if outcomes["broken"]:
        print(f"could not be put into place: {outcomes['broken']}", file=sys.stderr)
        return 2
    survivors = [v.mutant.kind for v in verdicts if v.outcome == "survived"]
    few = 100 * len(survivors) <= tolerated * len(verdicts)
    return 0 if few and not set(survivors) & set(ALWAYS) else 1


def _line(mutant: Mutant) -> str:
    return f"{mutant.name:58} {_short(mutant.before)} → {_short(mutant.after)}"


def _told(verdict: Verdict) -> str:
    mutant = verdict.mutant
    if verdict.outcome == "survived":
        return f"SURVIVED {_line(mutant)}   ({mutant.function})  {verdict.why}"
    word = {"hung": "hangs   ", "broken": "BROKEN  "}.get(verdict.outcome, "caught  ")
    return f"{word} {mutant.name:58} {verdict.test.removeprefix('tests/gpu_cache/')}  {verdict.why[:80]}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 90 else flat[:87] + "…"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mutations.run", description=__doc__)
    parser.add_argument(
        "--match", action="append", help="only mutants whose name, function or source holds this text; again: or this"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--sample", type=int, default=0, help="only so many of those that matter most: a quick look")
    parser.add_argument("--share", type=int, default=100, help="per cent of those that matter less")
    parser.add_argument(
        "--tolerate", type=int, default=0, help="so many per cent may survive, of those that matter less"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sample and share; else made from the sources")
    parser.add_argument("--list", action="store_true", help="say what would be changed, and run nothing")
    parser.add_argument("--remember", action="store_true", help=f"write who caught what into {CAUGHT_BY.name}")
    parser.add_argument("--verbose", action="store_true", help="tell each verdict as it comes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
