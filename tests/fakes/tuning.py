"""A card and compilers that are arithmetic: what a configuration costs is a formula, and some are refused or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from adapterd.gpu_cache.engine.tuning.cases import Config
from adapterd.gpu_cache.engine.tuning.compiling import Compiled, Job
from adapterd.gpu_cache.engine.tuning.stand import QUICK

Cost = Callable[[Config], float]


@dataclass
class FormulaCard:
    """µs of each kernel by a formula.

    Attributes:
        wrong: whose output is not the reference's.
        breaks: whom the driver refuses.
    """

    shrink: Cost
    expand: Cost
    wrong: Callable[[Config], bool] = lambda _: False
    breaks: Callable[[Config], bool] = lambda _: False
    timed: list[Config] = field(default_factory=list)
    used: list[Config] = field(default_factory=list)

    def use(self, config: Config) -> None:
        self.used.append(config)

    def right(self) -> bool:
        if self.breaks(self.used[-1]):
            raise RuntimeError("invalid argument")
        return not self.wrong(self.used[-1])

    def time(self, *, shrink: bool = True, expand: bool = True, repeats: int = QUICK) -> float:
        config = self.used[-1]
        self.timed.append(config)
        return shrink * self.shrink(config) + expand * self.expand(config)


@dataclass
class FormulaCompilers:
    """Every kernel compiles at once, but those that `refuses` names; what they take is a formula, too."""

    refuses: Callable[[Job], bool] = lambda _: False
    shared_memory: Callable[[Job], int] = lambda _: 1024
    asked: set[object] = field(default_factory=set)

    def submit(self, jobs: Iterable[Job]) -> None:
        self.asked |= {job.identity for job in jobs}

    def result(self, job: Job) -> Compiled:
        assert job.identity in self.asked, "nothing compiles while a case waits"
        return Compiled(fault="too many registers") if self.refuses(job) else Compiled(self.shared_memory(job))
