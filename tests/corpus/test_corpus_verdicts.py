"""The verdicts of the whole corpus, made afresh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adapterd.loader.base_files import read_config
from adapterd.loader.base_meta import meta_model
from adapterd.loader.base_model import BaseSpec
from corpus.run_corpus import make_corpus, run, table
from corpus.verdicts import CANARY, Corpus, bad_outcome, judge_bad, judge_good

BASES = (
    "llama", "llama4l", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "opt", "falcon",
    "bert", "bertbare", "distilbert", "gpt2cls", "t5", "qwen3moe", "mixtral",
)  # fmt: skip


@pytest.fixture(scope="session")
def bad_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """All bases, and the bad cases."""
    from corpus import make_bad
    from corpus.good.bases import write_base

    root = tmp_path_factory.mktemp("corpus")
    for name in BASES:
        write_base(name, root)
    make_bad.main(["--out", str(root)])
    return Corpus(root)


@pytest.mark.filterwarnings("ignore")
def test_all_bases_have_one_table_live_and_on_disk(bad_corpus: Corpus) -> None:
    from corpus.good.bases import base_specs, build_base

    assert set(base_specs()) == set(BASES)
    for name in BASES:
        stored = bad_corpus.base(name)
        live = BaseSpec.from_module(build_base(name), id=stored.id, revision=stored.revision)
        assert live == stored, name
        assert live.table_digest == stored.table_digest
        meta = meta_model(read_config(bad_corpus.base_directory(name)))
        assert BaseSpec.from_module(meta, id=stored.id, revision=stored.revision) == stored, name


def test_tables_are_the_modules_that_transformers_made(bad_corpus: Corpus) -> None:
    for name in BASES:
        listed = json.loads((bad_corpus.base_directory(name) / "modules.json").read_text())["modules"]
        mine = {m.path: m for m in bad_corpus.base(name).modules if m.kind != "experts"}
        assert mine.keys() == listed.keys(), name
        for path, info in listed.items():
            widths = (info.get("in", info.get("num_embeddings")), info.get("out", info.get("dim")))
            assert (mine[path].kind, mine[path].in_features, mine[path].out_features) == (
                info["kind"],
                *widths,
            )


def test_every_bad_case_gets_its_code(bad_corpus: Corpus) -> None:
    outcomes = [judge_bad(bad_corpus, case) for case in bad_corpus.bad()]
    assert len(outcomes) == 257
    assert not (short := [o for o in outcomes if not o.passed]), table(short)
    assert CANARY not in os.environ


def test_a_wrong_verdict_falls_short(bad_corpus: Corpus) -> None:
    by_name = {c.name: c for c in bad_corpus.bad(form="dir")}
    refused, warned = by_name["sem_nan"], by_name["sem_one_zero_b"]
    verdicts = {c.name: _verdict(bad_corpus, c.path) for c in (refused, warned)}
    assert bad_outcome("s", refused, verdicts["sem_nan"]).passed
    assert not bad_outcome("s", refused, verdicts["sem_one_zero_b"]).passed
    assert not bad_outcome("s", warned, verdicts["sem_nan"]).passed


def _verdict(corpus: Corpus, path: Path):
    from adapterd.loader.checks import examine_path

    return examine_path(path, corpus.base("llama"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_good_case_gets_its_verdict_and_peft_s_scaling(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    corpus = Corpus(tmp_path)
    outcomes = [judge_good(corpus, case) for case in corpus.good()]
    assert len(outcomes) == 82
    assert not (short := [o for o in outcomes if not o.passed]), table(short)
    assert all(o.passed for o in run(Corpus(tmp_path, "llama_plain"), ["verdicts"]))


@pytest.mark.slow
@pytest.mark.parametrize("only", ["zip_", "pkg_", "sem_d"])
def test_three_ways_give_one_answer(bad_corpus: Corpus, only: str) -> None:
    from corpus.three_ways import three_ways

    outcomes = list(three_ways(Corpus(bad_corpus.root, only)))
    assert {o.stage for o in outcomes} >= {"loader", "command", "api", "command = loader", "api = loader", "leftovers"}
    assert not (short := [o for o in outcomes if not o.passed]), table(short)


def test_no_code_of_the_package_knows_a_case(bad_corpus: Corpus) -> None:
    root = Path(__file__).resolve().parents[2]
    names = {c.name for c in bad_corpus.bad()}
    for folder in ("loader", "registry", "cli", "gpu_cache"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            assert not [n for n in names if n in text], path


def test_the_runner_says_what_fell_short(bad_corpus: Corpus, tmp_path: Path) -> None:
    index = json.loads((bad_corpus.root / "bad" / "index.json").read_text())
    index["cases"] = [{**c, "code": "QUOTA_EXCEEDED"} for c in index["cases"] if c["id"] == "sem_nan"]
    for name in ("bases", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "bases" / "llama").symlink_to(bad_corpus.base_directory("llama"))
    (tmp_path / "bad" / "sem_nan").symlink_to(bad_corpus.root / "bad" / "sem_nan")
    (tmp_path / "bad" / "index.json").write_text(json.dumps(index))
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "index.json").write_text("[]")
    command = [sys.executable, "-m", "corpus.run_corpus", "--corpus", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "sem_nan" in done.stdout
    assert "NONFINITE" in done.stdout
