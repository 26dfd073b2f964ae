"""The adapter-aware scheduler: `gpu_cache.selector` over the loop's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adapterd.cli.worker.prefix import BLOCK_TOKENS
from adapterd.cli.worker.scheduling import C, Candidate, Choice
from adapterd.gpu_cache.records import Place
from adapterd.gpu_cache.selector import Selector
from adapterd.gpu_cache.step_budget import StepBudget
from adapterd.gpu_cache.whereabouts import Whereabouts

ROWS_SHARE = 4
"""A prompt gets this part of a step's rows at most, so that several can start in one."""


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

    Args:
        budget: KV blocks, rows of a step and adapter bytes.
        ahead: as of `FirstComeFirstServed`.
    """

    def __init__(self, budget: StepBudget, ahead: int = 16) -> None:
        self._selector = Selector[_View](budget)
        self._rows = budget.limits.rows
        self._ahead = ahead
        self._tick = 0

    def admit(self, waiting: Sequence[C], idle: int) -> Sequence[C]:
        """See `Scheduler`."""
        return waiting[: max(self._ahead - idle, 0)]

    def choose(self, ready: Sequence[C], max_rows: int) -> Choice[C]:
        """See `Scheduler`."""
        self._tick += 1
        most = min(max_rows, max(self._rows // ROWS_SHARE, 1))
        views = {each.id: _view(each, min(each.pending, most)) for each in ready}
        resident = {
            (each.tenant, digest): Whereabouts(Place.RESIDENT, nbytes)
            for each in ready
            for digest, nbytes in each.adapter_bytes.items()
        }
        selection = self._selector.select(
            [views[each.id] for each in ready if not each.started],
            [views[each.id] for each in ready if each.started],
            resident,
            tick=self._tick,
        )
        named = {each.id: each for each in ready}
        return Choice(
            run=[(named[view.id], view.rows) for view in selection.run],
            refused=[(named[view.id], problem) for view, problem in selection.refused],
        )


def _view(each: Candidate, rows: int) -> _View:
    blocks = -(-each.most_tokens // BLOCK_TOKENS)
    return _View(each.id, each.tenant, tuple(each.adapter_bytes), each.arrival, blocks, rows)
