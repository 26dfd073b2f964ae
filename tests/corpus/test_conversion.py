"""`convert` against the corpus: wrong names become right ones, nothing else becomes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from corpus import make_bad
from corpus.conversion import SPOILERS, bad_names, spoilt_names
from corpus.good.bases import write_base
from corpus.run_corpus import make_corpus, table
from corpus.verdicts import Corpus


def test_names_alone_are_converted_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("llama", "bert", "gpt2", "t5"):
        write_base(name, tmp_path)
    make_bad.main(["--out", str(tmp_path)])
    outcomes = list(bad_names(Corpus(tmp_path)))
    assert len([o for o in outcomes if o.wanted.startswith("converted")]) == 5
    assert len(outcomes) > 50
    assert not (short := [o for o in outcomes if not o.passed]), table(short)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spoilt_and_converted_adapters_compute_what_peft_does(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    outcomes = list(spoilt_names(Corpus(tmp_path)))
    assert {o.case for o in outcomes} == SPOILERS.keys()
    assert not (short := [o for o in outcomes if not o.passed]), table(short)
