"""What the loop says about itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from adapterd.cli.worker.generation import State
from adapterd.cli.worker.graphs import GraphCounts
from adapterd.cli.worker.requests import Reason


class Progress(StrEnum):
    """What a call of `step` found to do."""

    RAN = "ran"  # rows have run; call again
    WAITING = "waiting"  # nothing can run, something loads; call again soon
    IDLE = "idle"  # nothing will run before somebody submits or resumes


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """Counts at one moment.

    Attributes:
        open: requests by state.
        ended: requests by reason, since the start.
        steps, rows: that have run.
        kv_bytes: keys and values of open requests.
        prefix_blocks, prefix_tokens: kept blocks; tokens that were taken from them.
        graphs: how steps of few rows were run.
    """

    open: Counter[State]
    ended: Counter[Reason]
    steps: int
    rows: int
    kv_bytes: int
    prefix_blocks: int
    prefix_tokens: int
    graphs: GraphCounts
