"""Merged models against PEFT and against the engine: one adapter, three ways to the same logits.

`adapterctl merge` writes a model; transformers opens it. Its weights are PEFT's `merge_and_unload`'s, and what it says
is what the base says with the adapter served by the engine.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from adapterd.loader.base_files import read_config
from corpus.good.references import run_model
from corpus.verdicts import Case, Corpus, Outcome
from fakes.commands import Commands

STAGE = "merge"
TOLERANCE = 1e-6
"""Of a weight of size 1, in float32: the sums are made in another order."""


def merging(corpus: Corpus) -> Iterator[Outcome]:
    """Every good case: what is accepted is merged as PEFT does, what is not is refused with the same code."""
    with tempfile.TemporaryDirectory(prefix="adapterd-merging-") as folder:
        shell = Commands(Path(folder, "home"))
        shell.home.mkdir()
        for case in corpus.good():
            yield merged_as_peft(corpus, case, shell, Path(folder, case.name))


def merged_as_peft(corpus: Corpus, case: Case, shell: Commands, out: Path) -> Outcome:
    base, folder = corpus.base(case.base), corpus.base_directory(case.base)
    named = ("--base", folder, "--base-id", base.id, "--base-revision", base.revision)
    result = shell.run("merge", case.path, *named, "--out", out, "--json")
    body = json.loads(result.stdout)
    if not case.accepted:
        codes = {p["code"] for p in body["problems"]}
        wanted = str(case.expected["verdict"]).removeprefix("reject:")
        return Outcome(STAGE, case.name, result.exit_code == 6 and wanted in codes, wanted, ", ".join(sorted(codes)))
    if result.exit_code:
        return Outcome(STAGE, case.name, False, "merged", str(body["problems"])[:200])
    off, moved = _differences(case, folder, out)
    done = off < TOLERANCE and moved == sum(m["delta_max"] > 0 for m in body["modules"]) > 0
    return Outcome(STAGE, case.name, done, "PEFT's weights", f"off by {off:.1e}, {moved} moved")


def _differences(case: Case, base: Path, out: Path) -> tuple[float, int]:
    """The largest difference to PEFT's merged weights, relative to the weight's largest value; and how many moved."""
    from peft import PeftModel

    plain = {name: t.clone() for name, t in loaded(base).state_dict().items()}
    theirs = PeftModel.from_pretrained(loaded(base), str(case.path)).merge_and_unload().state_dict()
    ours = loaded(out).state_dict()
    assert theirs.keys() == ours.keys(), case.name
    off = max(float((theirs[n] - t).abs().max() / max(1.0, float(t.abs().max()))) for n, t in ours.items())
    return off, sum(not torch.equal(t, plain[n]) for n, t in ours.items())


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in a folder, of the class that its config names."""
    kind = getattr(transformers, read_config(folder)["architectures"][0])
    return kind.from_pretrained(folder, dtype=dtype).eval()


__all__ = ["loaded", "merging", "run_model"]
