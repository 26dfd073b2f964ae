"""Runs the collected tests once for each mutant, in a child that is forked after everything was imported.

A fork costs milliseconds, so most mutants cost what the first test costs that notices them. The child puts the
mutant into place, runs the tests in the order that it was given, and stops at the first that fails.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from mutations.install import install, install_probes, place
from mutations.sites import Mutant

Outcome = Literal["caught", "hung", "survived", "broken"]
HANG_SECONDS, HANG_FACTOR, HANG_PATIENCE, UNKNOWN_SECONDS = 10.0, 20.0, 6.0, 2.0
"""A test hangs when it computes that long, and that many times as long as it takes without a mutant; or when it
takes `HANG_PATIENCE` times that, for it may wait instead. (A machine may be busy with other things.)"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant; `test` is the one that noticed it, `why` the first line of what it said.

    A broken one could not be put into place: that says nothing about the tests.
    """

    mutant: Mutant
    outcome: Outcome
    test: str
    why: str
    seconds: float


Order = Callable[[Mutant, Sequence[str], dict[str, float]], list[str]]
"""Which tests (by node id, with the seconds that each takes) judge a mutant, in which order."""


@dataclass
class Judge:
    """A pytest plugin. Its verdicts are complete when pytest has returned.

    Args:
        mutants: what to judge.
        order: who judges it.
        jobs: children at a time.
        told: called with each verdict.
        caught_by: by function (`install.place`), the tests that have caught something of it before: they go first.
        measured: whether all tests run without a mutant first. Otherwise nobody knows how long they take, and each
            is taken for a judge of everything.
    """

    mutants: Sequence[Mutant]
    order: Order
    jobs: int
    told: Callable[[Verdict], None]
    caught_by: Mapping[str, Sequence[str]] = field(default_factory=dict)
    measured: bool = True
    verdicts: list[Verdict] = field(default_factory=list)
    baseline: dict[str, float] = field(default_factory=dict)
    reached: dict[str, set[str]] = field(default_factory=dict)
    """The functions that each test calls. Who does not call a function cannot judge its mutants."""
    _caught_by: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: str = "no test was run"
    """The test that fails without any mutant, or what else is wrong; empty if all is well."""

    def pytest_sessionstart(self) -> None:
        self._caught_by.update((function, test) for function, tests in self.caught_by.items() for test in tests)
        _calm_down()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            self.broken = "the tests cannot be collected"
            return True
        items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()
        self.broken = ""
        if self.measured:
            self._measure(items)
        waiting, running = list(reversed(self.mutants)), list[_Child]()
        while not self.broken and (waiting or running):
            while waiting and len(running) < self.jobs:
                mutant = waiting.pop()
                able = [test for test in items if not self.measured or place(mutant) in self.reached[test]]
                tests = self._by_luck(mutant, self.order(mutant, able, self.baseline))
                running.append(_Child(mutant, [items[t] for t in tests]))
            for child in _ready(running):
                if child.step(self.baseline):
                    running.remove(child)
                    verdict = child.verdict()
                    self.verdicts.append(verdict)
                    self._caught_by.update([(place(verdict.mutant), verdict.test), (verdict.mutant.path, verdict.test)])
                    self.told(verdict)
        return True

    def _by_luck(self, mutant: Mutant, tests: list[str]) -> list[str]:
        """Who caught others of the same function goes first, then who caught others of the same file."""
        caught, function = self._caught_by, place(mutant)
        return sorted(tests, key=lambda test: (-caught[function, test], -caught[mutant.path, test]))

    def _measure(self, items: dict[str, pytest.Item]) -> None:
        child = _Child(None, list(items.values()), self.mutants)
        while not child.step({}):
            select.select([child.pipe], [], [], 0.5)
        self.baseline = child.seconds
        in_setup: dict[str, set[str]] = {}  # by file: fixtures may be shared
        for test, places in child.in_setup.items():
            in_setup.setdefault(test.partition("::")[0], set()).update(places)
        self.reached = {
            test: {*child.reached.get(test, ()), *in_setup.get(test.partition("::")[0], ())} for test in items
        }
        self.broken = f"{child.test} {child.failed}" if child.failed is not None or child.hung else ""


class _Child:
    """One forked process: writes the index of each test as it starts, and the failure, if there is one.

    Without a mutant it also writes which of the functions that `watched` would replace each test calls.
    """

    def __init__(self, mutant: Mutant | None, items: list[pytest.Item], watched: Sequence[Mutant] = ()) -> None:
        self.mutant, self.items = mutant, items
        self.seconds: dict[str, float] = {}
        self.in_setup: dict[str, list[str]] = {}
        self.reached: dict[str, list[str]] = {}
        self.broken = False
        self.failed: str | None = None
        self.hung = False
        self.current = -1
        self.began = self.since = time.monotonic()
        self.computed = 0.0
        self._text = b""
        self.pipe, into = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _live(mutant, items, into, watched)
        os.close(into)

    @property
    def test(self) -> str:
        return self.items[self.current].nodeid if self.current >= 0 else "(before the first test)"

    def limit(self, baseline: dict[str, float]) -> float:
        return max(HANG_SECONDS, HANG_FACTOR * baseline.get(self.test, UNKNOWN_SECONDS))

    def step(self, baseline: dict[str, float]) -> bool:
        """Reads what there is; whether the child is over."""
        ready, _, _ = select.select([self.pipe], [], [], 0)
        if ready:
            text = os.read(self.pipe, 1 << 16)
            if not text:
                return self._over()
            *lines, self._text = (self._text + text).split(b"\n")
            for line in lines:
                self._read(line.decode(errors="replace"))
        elif self._hangs(self.limit(baseline)):
            self.hung = True
            os.kill(self.pid, signal.SIGKILL)
            return self._over()
        return False

    def _hangs(self, limit: float) -> bool:
        taken = time.monotonic() - self.since
        if taken < limit:
            return False
        return taken > HANG_PATIENCE * limit or _computed(self.pid) - self.computed > limit

    def _read(self, line: str) -> None:
        what, _, rest = line.partition(" ")
        now = time.monotonic()
        if self.current >= 0 and what in {"test", "done"}:
            self.seconds[self.test] = now - self.since
        if what == "test":
            self.current, self.since, self.computed = int(rest), now, _computed(self.pid)
        elif what == "setup":
            self.in_setup[self.test] = json.loads(rest)
        elif what == "reached":
            self.reached[self.test] = json.loads(rest)
        elif what in {"failed", "broken"}:
            self.failed, self.broken = rest, what == "broken"

    def _over(self) -> bool:
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        if status and not self.hung and self.failed is None:
            self.failed = f"the process ended with status {status}"
        return True

    def verdict(self) -> Verdict:
        assert self.mutant is not None
        why = self.failed or ("" if self.items else "no test calls the function")
        outcome: Outcome = "survived" if self.failed is None else "caught"
        outcome = "broken" if self.broken else "hung" if self.hung else outcome
        test = "" if outcome == "survived" else self.test
        return Verdict(self.mutant, outcome, test, why, time.monotonic() - self.began)


def _calm_down() -> None:
    """The same examples for every mutant; a failure is not shrunk, nothing is remembered; no threads before a fork."""
    import torch
    from hypothesis import Phase, settings

    torch.set_num_threads(1)

    settings.register_profile(
        "mutations",
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.explicit, Phase.generate],
    )
    settings.load_profile("mutations")


def _computed(pid: int) -> float:
    """Seconds of processor time that a process has had; 0 where that cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ready(running: Sequence[_Child]) -> Iterator[_Child]:
    select.select([child.pipe for child in running], [], [], 0.5)
    yield from list(running)


def _live(mutant: Mutant | None, items: list[pytest.Item], pipe: int, watched: Sequence[Mutant]) -> None:
    """The child's whole life."""
    status, reached, word = 70, set[str](), "broken"
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        install_probes(watched, reached)
        if mutant is not None:
            install(mutant)
        word = "failed"
        _run(items, lambda what, rest: _write(pipe, what, rest), reached if watched else None)
        status = 0
    except BaseException as broken:  # noqa: BLE001 - whatever it is, the parent is told
        _write(pipe, word, f"{type(broken).__name__}: {broken}".splitlines()[0])
    finally:
        os._exit(status)


def _write(pipe: int, what: str, rest: str) -> None:
    left = f"{what} {rest}\n".encode()
    while left:
        left = left[os.write(pipe, left) :]


def _run(items: list[pytest.Item], say: Callable[[str, str], None], reached: set[str] | None) -> None:
    failed: list[pytest.TestReport] = []

    class Reports:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report)
            if report.when == "setup" and reached is not None:
                say("setup", json.dumps(sorted(reached)))

    if not items:
        return
    manager = items[0].config.pluginmanager
    terminal = manager.getplugin("terminalreporter")
    if terminal is not None:
        manager.unregister(terminal)
    manager.register(Reports())
    for index, item in enumerate(items):
        say("test", str(index))
        following = items[index + 1] if index + 1 < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if reached is not None:
            say("reached", json.dumps(sorted(reached)))
            reached.clear()
        if failed:
            say("failed", _reason(failed[0]))
            return
    say("done", "")


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longrepr).strip().splitlines()
    return lines[0][:200] if lines else ""
