"""The adapter-aware scheduler: `gpu_cache.selector` over the loop's requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from adapterd.cli.worker.kv import BLOCK_TOKENS
from adapterd.cli.worker.scheduling import C, Candidate, Choice
from adapterd.gpu_cache.records import Place
from adapterd.gpu_cache.selector import Selector
from adapterd.gpu_cache.step_budget import StepBudget
from adapterd.gpu_cache.whereabouts import Whereabouts

ROWS_SHARE = 4
"""A prompt gets this part of a step's rows at most, so that several can start in one."""
LOOK_EVERY = 32
"""Of the times that somebody has to stand in line. A look at all that is resident holds the cache's lock."""


class Row(Protocol):
    """A version in the cache's list; `gpu_cache.residency.Residence` is one."""

    @property
    def tenant(self) -> str: ...
    @property
    def adapters(self) -> tuple[str, ...]: ...
    @property
    def tier(self) -> Place: ...


@dataclass(frozen=True, slots=True)
class _View:
    """One request as the selector knows it; a `turns.Request`."""

    id: str
    tenant: str
    adapters: tuple[str, ...]
    arrived: int
    kv_blocks: int
    rows: int


class Selected:
    """Starts requests as the step budget allows, fairly between tenants; a `Scheduler` of one loop.

    The cache queues the loads, so a request comes here when its adapter is resident, and the budget's load slots
    are not used. Keys and values are counted in blocks of 16 tokens, for all that a request may come to need.

    While a line of requests waits for adapters that are slow to come, as many others may pass it, if theirs are
    in VRAM: they have seats of their own, and take none from the line.

    Args:
        budget: KV blocks, rows of a step and adapter bytes.
        ahead: as of `FirstComeFirstServed`.
        residency: what the cache has where, `AdapterCache.residency`; without it nobody passes the line.
    """

    def __init__(
        self, budget: StepBudget, ahead: int = 16, residency: Callable[[], Iterable[Row]] | None = None
    ) -> None:
        self._selector = Selector[_View](budget)
        self._rows = budget.limits.rows
        self._ahead, self._residency = ahead, residency
        self._passed: set[str] = set()
        self._views: dict[str, _View] = {}
        self._tick = self._lines = 0

    def admit(self, waiting: Sequence[C], idle: Sequence[C]) -> Sequence[C]:
        """See `Scheduler`."""
        self._passed &= {each.id for each in idle}
        seats = max(self._ahead - (len(idle) - len(self._passed)), 0)
        seated, line = waiting[:seats], waiting[seats:]
        return [*seated, *self._passing(line)] if line and self._residency is not None else seated

    def _passing(self, line: Sequence[C]) -> Sequence[C]:
        """Who needs no load. An alias may mean another version by now: that one then loads from a seat of these."""
        self._lines += 1
        seats = self._ahead - len(self._passed)
        if seats <= 0 or self._lines % LOOK_EVERY != 1 or self._residency is None:
            return ()
        resident = {
            (row.tenant, name) for row in self._residency() if row.tier is Place.RESIDENT for name in row.adapters
        }
        here = [c for c in line if c.names and all((c.tenant, name) in resident for name in c.names)][:seats]
        self._passed |= {each.id for each in here}
        return here

    def choose(self, ready: Sequence[C], max_rows: int) -> Choice[C]:
        """See `Scheduler`."""
        self._tick += 1
        most = min(max_rows, max(self._rows // ROWS_SHARE, 1))
        named = {each.id: each for each in ready}
        running: list[_View] = []
        waiting: list[_View] = []
        for each in ready:
            (running if each.started else waiting).append(self._view(each, min(each.pending, most)))
        self._views = {view.id: view for view in (*running, *waiting)}
        resident = {  # what runs keeps its own in VRAM: nobody asks where it is
            (view.tenant, digest): Whereabouts(Place.RESIDENT, nbytes)
            for view in waiting
            for digest, nbytes in named[view.id].adapter_bytes.items()
        }
        selection = self._selector.select(waiting, running, resident, tick=self._tick)
        return Choice(
            run=[(named[view.id], view.rows) for view in selection.run],
            refused=[(named[view.id], problem) for view, problem in selection.refused],
        )

    def _view(self, each: Candidate, rows: int) -> _View:
        """The one of the step before, if nothing has changed."""
        known = self._views.get(each.id)
        if known is not None and known.rows == rows and known.arrived == each.arrival:
            return known
        blocks = -(-each.most_tokens // BLOCK_TOKENS)
        return _View(each.id, each.tenant, tuple(each.adapter_bytes), each.arrival, blocks, rows)
