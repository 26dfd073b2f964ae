"""Every bad case through the loader, the command and the API: one verdict, byte for byte.

The loader is `examine` on `open_package`; the command is `adapterctl verify --json`, in this process and, for a
sample, in one of its own; the API gets the raw files over HTTP, without a check of ours before. An archive is a
client's form: what can be unpacked is sent, and what cannot, or cannot even be declared (links), is refused by the
client, which the outcome says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapterd.loader.checks import examine_path
from adapterd.loader.errors import AdapterdError, Code, Problem, reject
from adapterd.loader.formats.archives import open_package
from adapterd.loader.formats.package import judge_package
from corpus.running import World, contents, running_world, sent
from corpus.verdicts import Answer, Case, Corpus, Outcome, bad_outcome
from fakes.commands import Commands

TENANT = "hostile"
MEMORY_BYTES = 100 << 20
"""What a verdict may take beyond what was there before, whatever the file declares."""
SLOW_SECONDS = 1.0
SAMPLE_EVERY = 37
"""Of the cases that a process of its own judges, too: starting one takes a second."""


@dataclass
class Measured:
    """What the whole run took; told at its end."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    refused_by_client: int = 0

    def tell(self) -> None:
        slow = max(self.seconds, key=self.seconds.__getitem__, default="")
        large = max(self.peak, key=self.peak.__getitem__, default="")
        over = [name for name, seconds in self.seconds.items() if seconds > SLOW_SECONDS]
        if slow:
            print(
                f"slowest: {slow}, {self.seconds[slow]:.2f} s of processor time ({len(over)} over {SLOW_SECONDS:g} s); "
                f"largest: {large}, {self.peak[large] / 1e6:.1f} MB; {self.refused_by_client} refused by the client "
                "before anything was declared",
                file=sys.stderr,
            )


def three_ways(corpus: Corpus) -> Iterator[Outcome]:
    """Stage 2 of `make corpus`: three verdicts for a case, and whether they are one."""
    measured = Measured()
    with running_world(corpus, TENANT) as world, _sandbox(corpus) as sandbox:
        world.operator.set_policy(TENANT, {"require_signature": False, "allow": [], "limits": corpus.limits_json})
        command = _Command(corpus, sandbox.home)
        before = _memory_of(world)
        for number, case in enumerate(corpus.bad()):
            yield from _judged(world, command, case, measured)
            if number % SAMPLE_EVERY == 0:
                yield _same("command, own process", case, command.here(case), command.elsewhere(case))
            yield sandbox.unchanged(case)
        grown = _memory_of(world) - before
        yield Outcome("api memory", "all", grown < MEMORY_BYTES, "under 100 MB", f"{grown / 1e6:.1f} MB")
        left = list((world.data_dir / "uploads").glob("*"))
        yield Outcome("api leftovers", "all", not left, "no staged files", f"{len(left)} folders")
    measured.tell()


def _judged(world: World, command: _Command, case: Case, measured: Measured) -> Iterator[Outcome]:
    loader = _by_loader(world.corpus, case, measured)
    yield bad_outcome("loader", case, loader)
    peak = measured.peak[case.name]
    yield Outcome("loader memory", case.name, peak < MEMORY_BYTES, "under 100 MB", f"{peak / 1e6:.1f} MB")
    told = command.here(case)
    yield bad_outcome("command", case, told)
    yield _same("command", case, loader, told)
    api, kept_back = _by_api(world, case, measured)
    yield bad_outcome("api", case, Answer((*api.problems, *kept_back), api.manifest))
    expected = Answer(tuple(p for p in loader.problems if p not in kept_back), loader.manifest)
    yield _same("api", case, expected, api)


def _by_loader(corpus: Corpus, case: Case, measured: Measured) -> Answer:
    """Once for the time, once for the memory: measuring the one costs the other."""
    start = time.process_time()
    answer = _examined(corpus, case)
    measured.seconds[case.name] = time.process_time() - start
    tracemalloc.start()
    try:
        again = _examined(corpus, case)
        measured.peak[case.name] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer == again, case.name
    return answer


def _examined(corpus: Corpus, case: Case) -> Answer:
    verdict = examine_path(
        case.path, corpus.base(case.base), limits=corpus.limits,
        declared_sha256=case.expected.get("declared_sha256", {}),
    )  # fmt: skip
    return Answer(verdict.problems, verdict.manifest.as_json() if verdict.manifest else None)


class _Command:
    """`adapterctl verify` with the corpus's limits and bases as files."""

    def __init__(self, corpus: Corpus, home: Path) -> None:
        self._shell = Commands(home)
        self._home = home
        (home / "limits.json").write_text(json.dumps(corpus.limits_json))
        for name in corpus.base_names():
            corpus.base(name).save(home / f"{name}.json")

    def here(self, case: Case) -> Answer:
        result = self._shell.run(*self._words(case))
        return _answer(result.stdout, result.exit_code, result.stderr)

    def elsewhere(self, case: Case) -> Answer:
        words = [sys.executable, "-m", "adapterd.cli", *map(str, self._words(case))]
        environment = {**os.environ, "HOME": str(self._home)}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        return _answer(done.stdout, done.returncode, done.stderr)

    def _words(self, case: Case) -> list[object]:
        declared = case.expected.get("declared_sha256", {}).items()
        hashes = [word for name, digest in declared for word in ("--sha256", f"{name}={digest}")]
        base = self._home / f"{case.base}.json"
        return ["verify", case.path, "--base", base, "--limits", self._home / "limits.json", *hashes, "--json"]


def _answer(stdout: str, status: int, diagnosis: str) -> Answer:
    """What the command said; a command that says nothing is a finding, and no end of the run."""
    try:
        body = json.loads(stdout)
    except ValueError:
        return Answer((reject(Code.INTERNAL, "adapterctl", f"status {status}: {diagnosis.strip()[-300:]}"),), None)
    if (status == 0) is not body["ok"] or status not in (0, 6):
        return Answer((reject(Code.INTERNAL, "adapterctl", f"status {status}, ok {body['ok']}"),), None)
    return Answer(tuple(map(Problem.from_json, body["problems"])), body["manifest"])


def _by_api(world: World, case: Case, measured: Measured) -> tuple[Answer, tuple[Problem, ...]]:
    """The server's answer, or the client's that had nothing to send; and what the client kept back, and why."""
    kept_back: tuple[Problem, ...] = ()
    try:
        with open_package(case.path, world.corpus.limits) as package:
            judged = judge_package(package.sizes(), world.corpus.limits)
            content = contents(package)
        if judged.ok:  # else the server gets the very names that it must refuse
            content = {name: content[name] for name in judged.stored}
            kept_back = judged.problems
    except AdapterdError as refusal:
        measured.refused_by_client += 1
        return Answer(refusal.problems, None), ()
    try:
        upload = sent(world, case, content, declared=case.expected.get("declared_sha256"))
    except AdapterdError as refusal:
        return Answer(refusal.problems, None), kept_back
    if upload.version is None:
        return Answer(upload.problems, None), kept_back
    raw: Mapping[str, Any] = upload.version.raw
    return Answer(tuple(map(Problem.from_json, raw["warnings"])), raw["manifest"]), kept_back


def _same(stage: str, case: Case, one: Answer, other: Answer) -> Outcome:
    """Byte-equal `problems` and `manifest`; norms are compared elsewhere, to a tolerance."""
    for what, a, b in (("problems", _problems(one), _problems(other)), ("manifest", _manifest(one), _manifest(other))):
        if a != b:
            return Outcome(f"{stage} = loader", case.name, False, f"{what} {a[:200]}", b[:200])
    return Outcome(f"{stage} = loader", case.name, True, "equal", "equal")


def _problems(answer: Answer) -> str:
    return json.dumps([p.as_json() for p in answer.problems])


def _manifest(answer: Answer) -> str:
    if answer.manifest is None:
        return "null"
    modules = [{k: v for k, v in m.items() if k != "delta_norm"} for m in answer.manifest["modules"]]
    return json.dumps({**answer.manifest, "modules": modules})


def _memory_of(world: World) -> int:
    """The most memory that the server has had so far, in bytes."""
    status = Path(f"/proc/{world.server.process.pid}/status").read_text()
    (line,) = (x for x in status.splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


@dataclass(frozen=True)
class _Sandbox:
    """Where a hostile package could leave something: the temporary and the working folder, and what is above them."""

    root: Path
    corpus: Path
    before: frozenset[str]

    @property
    def home(self) -> Path:
        return self.root / "home"

    def unchanged(self, case: Case) -> Outcome:
        new = sorted(_listing(self.root, self.corpus) - self.before)
        return Outcome("leftovers", case.name, not new, "nothing left behind", ", ".join(new[:3]) or "nothing")


def _listing(root: Path, corpus: Path) -> frozenset[str]:
    """What is there, but for the command's own home."""
    ours = [p for p in root.rglob("*") if not p.is_relative_to(root / "home")]
    theirs = [*corpus.glob("*"), *corpus.glob("bad/*"), Path("/tmp/corpus_escape.txt")]
    return frozenset(str(p) for p in (*ours, *theirs) if p.exists() or p.is_symlink())


@contextmanager
def _sandbox(corpus: Corpus) -> Iterator[_Sandbox]:
    root = Path(tempfile.mkdtemp(prefix="adapterd-sandbox-"))
    for name in ("home", "a/b/tmp", "a/b/work"):
        (root / name).mkdir(parents=True)
    before = tempfile.tempdir
    tempfile.tempdir = str(root / "a/b/tmp")
    try:
        with chdir(root / "a/b/work"):
            yield _Sandbox(root, corpus.root, _listing(root, corpus.root))
    finally:
        tempfile.tempdir = before
        subprocess.run(["rm", "-rf", str(root)], check=False)
