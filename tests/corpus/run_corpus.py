"""`make corpus`: every case of the corpus against what it must get; a table of what falls short.

    PYTHONPATH=tests python -m corpus.run_corpus [--corpus build/corpus] [--stage verdicts] [--only PART]

A stage is a function from the corpus to outcomes; `STAGES` names them in order. The corpus is made
first if it is not there (`make_good`, `make_bad`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from corpus.verdicts import Corpus, Outcome, judge_bad, judge_good

HERE = Path(__file__).resolve().parent
DEFAULT_CORPUS = HERE.parent.parent / "build" / "corpus"


def verdicts(corpus: Corpus) -> Iterator[Outcome]:
    """Stage 1: `examine` on every case."""
    for case in corpus.good():
        yield judge_good(corpus, case)
    for case in corpus.bad():
        yield judge_bad(corpus, case)


def three_ways(corpus: Corpus) -> Iterable[Outcome]:
    """Stage 2: every bad case through the loader, the command and the API."""
    from corpus.three_ways import three_ways as run_it

    return run_it(corpus)


def whole_path(corpus: Corpus) -> Iterable[Outcome]:
    """Stage 3: every good case over HTTP to the forward pass (torch is imported here)."""
    from corpus.whole_path import whole_path as run_it

    return run_it(corpus)


def conversion(corpus: Corpus) -> Iterable[Outcome]:
    """Stage 4: `convert` on wrong names, and on good adapters whose names were spoilt, up to the forward pass."""
    from corpus.conversion import bad_names, spoilt_names

    yield from bad_names(corpus)
    yield from spoilt_names(corpus)


def merging(corpus: Corpus) -> Iterable[Outcome]:
    """Stage 5: `merge` on every good case, against PEFT's merged weights."""
    from corpus.merging import merging as run_it

    return run_it(corpus)


STAGES: dict[str, Callable[[Corpus], Iterable[Outcome]]] = {
    "verdicts": verdicts,
    "three-ways": three_ways,
    "whole-path": whole_path,
    "conversion": conversion,
    "merging": merging,
}


def make_corpus(root: Path) -> None:
    """Run the generators where their output is missing."""
    for script, product in (("make_good", "good"), ("make_bad", "bad")):
        if not (root / product / "index.json").exists():
            print(f"making {root / product} …", file=sys.stderr)
            environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
            command = [sys.executable, "-m", f"corpus.{script}", "--out", str(root)]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def run(corpus: Corpus, stages: Iterable[str]) -> list[Outcome]:
    """All outcomes, with a line of progress for each stage."""
    outcomes: list[Outcome] = []
    for name in stages:
        start = time.monotonic()
        found = list(STAGES[name](corpus))
        short = sum(not o.passed for o in found)
        print(
            f"{name}: {len(found)} outcomes, {short} fall short, {time.monotonic() - start:.1f} s",
            file=sys.stderr,
        )
        outcomes += found
    return outcomes


def table(outcomes: Iterable[Outcome]) -> str:
    """What fell short, one line a case."""
    rows = [("stage", "case", "wanted", "got")]
    rows += [(o.stage, o.case, o.wanted, o.got) for o in outcomes if not o.passed]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=DEFAULT_CORPUS)
    parser.add_argument("--stage", action="append", choices=list(STAGES))
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    arguments = parser.parse_args(argv)
    make_corpus(arguments.corpus)
    outcomes = run(Corpus(arguments.corpus.resolve(), arguments.only), arguments.stage or STAGES)
    short = [o for o in outcomes if not o.passed]
    print(table(outcomes) if short else f"all {len(outcomes)} outcomes are as they must be")
    return 1 if short or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
