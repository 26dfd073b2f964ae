"""What the corpus expects, and whether a verdict meets it (tests/corpus/README.md)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import Verdict, examine_path
from adapterd.loader.errors import Problem
from adapterd.loader.limits import Limits
from adapterd.loader.manifest import Manifest

CANARY = "ADAPTER_CORPUS_CANARY"


@dataclass(frozen=True)
class Case:
    """One case: its name, the folder or archive, the base it speaks of, and what its index says."""

    name: str
    path: Path
    base: str
    expected: Mapping[str, Any]

    @property
    def accepted(self) -> bool:
        """For good cases."""
        return str(self.expected["verdict"]).startswith("accept")


@dataclass(frozen=True)
class Outcome:
    """What a stage found for a case; `wanted` and `got` are for people."""

    stage: str
    case: str
    passed: bool
    wanted: str
    got: str


class Corpus:
    """The generators' output under `root`; of its cases those whose name has `only` in it."""

    def __init__(self, root: Path, only: str = "") -> None:
        self.root = root
        self._only = only
        self._bases: dict[str, BaseSpec] = {}
        self._bad = json.loads((root / "bad" / "index.json").read_text())

    @property
    def limits(self) -> Limits:
        """What the quota cases are written against."""
        return Limits.from_json(self.limits_json)

    @property
    def limits_json(self) -> dict[str, Any]:
        """The same as `--limits` and a tenant's policy take them."""
        return dict(self._bad["limits"])

    def base_names(self) -> list[str]:
        """Short names of all bases."""
        return sorted(p.name for p in (self.root / "bases").iterdir())

    def base_directory(self, short: str) -> Path:
        return self.root / "bases" / short

    def base(self, short: str) -> BaseSpec:
        """The base `corpus/tiny-<short>`, from its files."""
        if short not in self._bases:
            info = json.loads((self.base_directory(short) / "modules.json").read_text())
            self._bases[short] = BaseSpec.from_directory(
                self.base_directory(short), id=info["base_model"], revision=info["revision"]
            )
        return self._bases[short]

    def good(self) -> Iterator[Case]:
        """All good cases."""
        for entry in json.loads((self.root / "good" / "index.json").read_text()):
            if self._only not in entry["case"]:
                continue
            folder = self.root / "good" / entry["case"]
            expected = json.loads((folder / "expected.json").read_text())
            yield Case(entry["case"], folder / expected["adapter_path"], expected["base"], expected)

    def bad(self, form: str | None = None) -> Iterator[Case]:
        """Bad cases, all or those of one form."""
        for entry in self._bad["cases"]:
            if form in (None, entry["form"]) and self._only in entry["id"]:
                short = entry["base"].removeprefix("corpus/tiny-")
                yield Case(entry["id"], self.root / "bad" / entry["path"], short, entry)


def judge_good(corpus: Corpus, case: Case) -> Outcome:
    """Verdict, warnings and per-module scaling of a good case."""
    verdict = examine_path(case.path, corpus.base(case.base), limits=corpus.limits)
    wanted = str(case.expected["verdict"])
    got = _good_verdict(verdict, wanted, set(case.expected["warn_codes"]))
    if got != wanted:
        return Outcome("verdicts", case.name, False, wanted, f"{got}: {_told(verdict)}")
    wrong = _scaling_differences(verdict.manifest, case.expected["modules"]) if verdict.manifest else []
    return Outcome("verdicts", case.name, not wrong, f"{wanted}, PEFT's scaling", "; ".join(wrong) or got)


def _good_verdict(verdict: Verdict, wanted: str, listed: set[str]) -> str:
    """The verdict in the corpus's words. `listed` codes are due with a warning, and allowed without one."""
    if verdict.manifest is None:
        return f"reject:{verdict.problems[0].code}"
    codes = {p.code.value for p in verdict.problems}
    if not codes or (wanted == "accept" and codes <= listed):
        return "accept"
    return "accept_with_warning" if not listed or codes & listed else f"accept_with_warning:{sorted(codes)}"


def _scaling_differences(manifest: Manifest, expected: list[Mapping[str, Any]]) -> list[str]:
    ours = {m.name: m for m in manifest.modules}
    theirs = {m["module"]: m for m in expected}
    wrong = [f"modules {sorted(ours.keys() ^ theirs.keys())[:3]}"] if ours.keys() != theirs.keys() else []
    for name in sorted(ours.keys() & theirs.keys()):
        mine, peft = ours[name], theirs[name]
        same = mine.rank == peft["r"] and math.isclose(mine.scaling, peft["scale"], rel_tol=1e-12)
        if not same or list(mine.a.shape) != peft["a_shape"] or list(mine.b.shape) != peft["b_shape"]:
            wrong.append(f"{name}: rank {mine.rank} scaling {mine.scaling}, PEFT {peft['r']} {peft['scale']}")
    return wrong


def judge_bad(corpus: Corpus, case: Case) -> Outcome:
    """A bad case must be refused with its code, or warned of with it; the pickles' canary must stay unset."""
    declared = case.expected.get("declared_sha256", {})
    verdict = examine_path(case.path, corpus.base(case.base), limits=corpus.limits, declared_sha256=declared)
    return bad_outcome("verdicts", case, verdict)


@dataclass(frozen=True)
class Answer:
    """A verdict as it came over a surface: problems, and the manifest's JSON."""

    problems: tuple[Problem, ...]
    manifest: Mapping[str, Any] | None


def bad_outcome(stage: str, case: Case, verdict: Verdict | Answer) -> Outcome:
    """Whether `verdict` is what the index wants; for a reject, the first problem is the one that counts."""
    codes = {case.expected["code"], *case.expected["also"]}
    wanted = f"{case.expected['verdict']} {' | '.join(sorted(codes))}"
    first = verdict.problems[0].code.value if verdict.problems else ""
    if case.expected["verdict"] == "reject":
        passed = verdict.manifest is None and first in codes
    elif verdict.manifest is None:
        passed = first in codes and "reject" in case.expected["note"].lower()
    else:
        passed = any(p.code.value in codes for p in verdict.problems)
    return Outcome(stage, case.name, passed and CANARY not in os.environ, wanted, _told(verdict))


def _told(verdict: Verdict | Answer) -> str:
    said = "accepted" if verdict.manifest is not None else "refused"
    return said + "".join(f" | {p.severity} {p}" for p in verdict.problems[:2])[:300]
