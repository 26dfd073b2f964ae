"""One case on the card: any configuration of it, checked against the reference and timed."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from adapterd.gpu_cache.engine.device_plan import PlanView, Regime
from adapterd.gpu_cache.engine.fast_path import FastPath
from adapterd.gpu_cache.engine.layers import find_sites
from adapterd.gpu_cache.engine.plan import BatchPlan
from adapterd.gpu_cache.engine.tables import Tables
from adapterd.gpu_cache.engine.tuning.cases import Case, Config, Fixed
from adapterd.gpu_cache.engine.tuning.timing import graph_us
from adapterd.gpu_cache.engine.tuning.world import World
from adapterd.gpu_cache.table_shape import MAX_RANK

MOST_ERROR = 5e-3
"""Of the whole output, relative; h is rounded to bf16, which costs 2.6e-3."""
MOST_SPIKE = 0.05
"""Of one element, over the largest: a strip or a row that was left out is in no average."""
QUICK, THOROUGH = 7, 31
"""Replays whose median is taken, for candidates and for the best of them."""


class NoStandError(Exception):
    """No step of the workload is worked on in the regime of the case."""


class Stand:
    """A world, the kernels on it, and what they ought to give.

    Raises:
        NoStandError.
    """

    def __init__(self, case: Case, device: str, *, pdl: bool) -> None:
        self.case, self.world = case, World(case.workload, device)
        self._wanted = self.world.once(kernels="reference")
        base, model = self.world.cache.base, self.world.model
        sites = find_sites(model, base, self.world.stacked, None)
        tables = Tables(frozenset(part.path for site in sites for part in site.slices))
        self._fast = FastPath(self.world.cache, sites, "BF16", tables.of, max_rank=MAX_RANK, pdl=pdl)
        self._linears = [self._fast.linear(site) for site in sites]
        self._view = self._of_regime()

    def _of_regime(self) -> PlanView:
        """The step's lists in the regime of the case alone; configurations are taken as they are, not `spread`."""
        leases, lengths = zip(*self.world.rows, strict=True)
        plan = BatchPlan(tuple([lease.composition for lease in leases]), lengths, sum(lengths))
        view = self._fast.prepare(plan).view
        if view is None:
            raise NoStandError(f"{self.case.name}: kernels do not serve this step")
        found = view if self.case.regime is Regime.ROWS else view.together or view
        if found.shape.regime is not self.case.regime:
            raise NoStandError(f"{self.case.name}: a step of it is in the regime of {found.shape.regime}")
        return replace(found, shape=replace(found.shape, together=None, groups=0), together=None)

    def use(self, config: Config) -> None:
        self._fast.launcher.use(Fixed(config))

    def right(self) -> bool:
        """Whether the configuration in use gives what the reference gives; it is compiled by then."""
        layer = self.world.model.layers()[0]
        layer.y.zero_()
        self._fast.launcher.run(self._linears[0], self._view, layer.x, layer.y)
        return agrees(layer.y.float(), self._wanted)

    def time(self, *, shrink: bool = True, expand: bool = True, repeats: int = QUICK) -> float:
        """µs of a linear with the configuration in use."""
        return graph_us(lambda: self._once(shrink=shrink, expand=expand), repeats) / self.world.sets

    def _once(self, *, shrink: bool = True, expand: bool = True) -> None:
        for linear, layer in zip(self._linears, self.world.model.layers(), strict=True):
            self._fast.launcher.run(linear, self._view, layer.x, layer.y, shrink=shrink, expand=expand)


def agrees(got: Tensor, wanted: Tensor) -> bool:
    off = got - wanted
    close = bool(off.norm() <= MOST_ERROR * wanted.norm())  # False for NaN, too
    return close and bool(off.abs().max() <= MOST_SPIKE * wanted.abs().max())
