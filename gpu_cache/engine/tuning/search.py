"""The search: each case's candidates are compiled ahead, checked, timed, and the best of them written down.

`shrink` first, for every number of parts; then `expand` at the rule's parts; then the few best pairs together, beside
the rule's own. Only what was timed as a pair gets an entry. Where nothing beats the rule by more than the noise, the
rule's configuration is the entry, so that no neighbour answers for it.
While a case is timed, the kernels of the next ones compile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from adapterd.gpu_cache.engine.kernels.configs import RowsConfig
from adapterd.gpu_cache.engine.kernels.tuned import Entry
from adapterd.gpu_cache.engine.tuning.cases import Case, Config, expand_candidates, shrink_candidates
from adapterd.gpu_cache.engine.tuning.compiling import Compiled, Job, jobs_of
from adapterd.gpu_cache.engine.tuning.stand import QUICK, THOROUGH, NoStandError
from adapterd.gpu_cache.engine.tuning.workloads import ITEM_BYTES

AHEAD = 2
"""Cases whose kernels compile while one is timed."""
FINALS = 2
"""Of the best numbers of parts, and of the best ways to expand, that are tried as pairs."""
NOISE = 0.98
"""What is to replace the rule's has to take at most so much of its time; graph times repeat within 1.6 %."""


class Compiling(Protocol):
    """What compiles ahead (`compiling.Compilers`)."""

    def submit(self, jobs: Iterable[Job]) -> None: ...
    def result(self, job: Job) -> Compiled: ...


class OnCard(Protocol):
    """What runs a case's configurations (`stand.Stand`)."""

    def use(self, config: Config) -> None: ...
    def right(self) -> bool: ...
    def time(self, *, shrink: bool = True, expand: bool = True, repeats: int = QUICK) -> float: ...


@dataclass(frozen=True)
class Card:
    """What the kernels are compiled for."""

    pdl: bool
    shared_memory: int


@dataclass
class Tally:
    """What became of the candidates, and of the cases."""

    timed: int = 0
    not_compiled: int = 0
    too_much_shared_memory: int = 0
    wrong: int = 0
    failed: int = 0
    rule_is_best: int = 0
    cases: int = 0
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Search:
    """One search.

    Attributes:
        stand: opens a case on the card.
        out_of_time: asked before every case and every step of it.
        progress: told a line as cases are done.
        known: the kernels of what was looked at.
    """

    card: Card
    compilers: Compiling
    stand: Callable[[Case], OnCard]
    out_of_time: Callable[[], bool]
    progress: Callable[[str], object]
    tally: Tally = field(default_factory=Tally)
    known: dict[tuple[Case, Config], tuple[Job, Job]] = field(default_factory=dict)

    def run(self, cases: Sequence[Case]) -> Iterator[Entry]:
        """An entry for each case whose best beats the rule, as they are found."""
        for index, case in enumerate(cases):
            if self.out_of_time():
                self.tally.left_out += [one.name for one in cases[index:]]
                return
            for near in cases[index : index + 1 + AHEAD]:
                self.compilers.submit(self._jobs(near))
            entry = self._tuned(case)
            self.progress(f"{index + 1}/{len(cases)} {case.name}: {_told(entry)}")
            if entry is not None:
                yield entry
            gc.collect()  # the case's gigabytes, before the next one's

    def _tuned(self, case: Case) -> Entry | None:
        try:
            stand = self.stand(case)
        except NoStandError as none:
            self.tally.left_out.append(str(none))
            return None
        found = _Case(self, case, stand).best()
        self.tally.cases += 1
        if found is None:
            return None
        config, us, rule_us = found
        if config == case.by_rule() or us > NOISE * rule_us:
            self.tally.rule_is_best += 1
            config, us = case.by_rule(), rule_us
        return Entry(case.key, ITEM_BYTES, config, us, rule_us)

    def _jobs(self, case: Case) -> list[Job]:
        """All that the first two parts of a search need, each once; what is timed together comes together."""
        configs = [case.by_rule(), *shrink_candidates(case), *expand_candidates(case)]
        return [job for config in configs for job in self.jobs(case, config)]

    def jobs(self, case: Case, config: Config) -> tuple[Job, Job]:
        if (case, config) not in self.known:
            launch = case.launch(config, pdl=self.card.pdl, shared_memory=self.card.shared_memory)
            self.known[case, config] = jobs_of(launch, case.regime)
        return self.known[case, config]


class _Case:
    """The search for one case."""

    def __init__(self, search: Search, case: Case, stand: OnCard) -> None:
        self._search, self._case, self._stand = search, case, stand

    def best(self) -> tuple[Config, float, float] | None:
        """(the configuration, its µs, the rule's µs); None if not even the rule's runs."""
        rule = self._case.by_rule()
        shrinks = self._ranked(shrink_candidates(self._case), shrink=True, expand=False)
        expands = self._ranked(expand_candidates(self._case), shrink=False, expand=True)
        pairs = list(dict.fromkeys(_pairs(rule, shrinks, expands)))
        self._search.compilers.submit(job for pair in pairs for job in self._search.jobs(self._case, pair))
        finals = self._ranked([rule, *pairs], repeats=THOROUGH)
        times = {config: us for us, config in finals}
        if rule not in times:
            return None
        us, config = finals[0]
        return config, us, times[rule]

    def _ranked(
        self, configs: Iterable[Config], *, shrink: bool = True, expand: bool = True, repeats: int = QUICK
    ) -> list[tuple[float, Config]]:
        """(µs, configuration) of those that are right, the fastest first."""
        found = []
        for config in configs:
            if self._search.out_of_time() and config != self._case.by_rule():
                continue
            us = self._time(config, shrink=shrink, expand=expand, repeats=repeats)
            if us is not None:
                found.append((us, config))
        return sorted(found, key=lambda pair: pair[0])

    def _time(self, config: Config, *, shrink: bool, expand: bool, repeats: int) -> float | None:
        tally = self._search.tally
        for compiled in map(self._search.compilers.result, self._search.jobs(self._case, config)):
            if compiled.fault:
                tally.not_compiled += 1
                return None
            if compiled.shared_memory > self._search.card.shared_memory:
                tally.too_much_shared_memory += 1
                return None
        try:
            self._stand.use(config)
            if not self._stand.right():
                tally.wrong += 1
                return None
            us = self._stand.time(shrink=shrink, expand=expand, repeats=repeats)
        except RuntimeError:  # what the driver says of a kernel that it does not take
            tally.failed += 1
            return None
        tally.timed += 1
        return us


def _pairs(
    rule: Config, shrinks: Sequence[tuple[float, Config]], expands: Sequence[tuple[float, Config]]
) -> Iterator[Config]:
    """The best ways to shrink, one for each number of parts, with the best ways to expand."""
    by_split: dict[int, Config] = {}
    for _, config in shrinks:
        by_split.setdefault(config.split, config)
    firsts = list(by_split.values())[:FINALS] or [rule]
    for first in firsts:
        for second in [config for _, config in expands[:FINALS]] or [rule]:
            yield _joined(first, second)


def _joined(first: Config, second: Config) -> Config:
    """`shrink` as in the first, `expand` as in the second."""
    if isinstance(first, RowsConfig) or isinstance(second, RowsConfig):
        return replace(first, block_n=second.block_n, expand_warps=second.expand_warps)
    return replace(
        first, block_n=second.block_n, walk=second.walk, expand_warps=second.expand_warps,
        expand_stages=second.expand_stages,
    )  # fmt: skip


def _told(entry: Entry | None) -> str:
    if entry is None:
        return "left out"
    return f"{entry.us:.1f} µs, {entry.rule_us:.1f} by the rule"
