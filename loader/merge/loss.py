"""What of a delta is left after rounding: a change smaller than half a step of the weight's dtype is no change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Loss:
    """Counts, over the blocks of one weight, what its delta was and what came of it."""

    def __init__(self) -> None:
        self.values = 0
        self.changed = 0
        self.delta_max = 0.0
        self.lost_max = 0.0
        self._delta = 0.0
        self._lost = 0.0

    def add(self, wanted: NDArray[Any], kept: NDArray[Any]) -> None:
        """Take in a block: the change that was wanted, and the one that the stored weights saw."""
        lost = wanted - kept
        self.values += wanted.size
        self.changed += int(np.count_nonzero(kept))
        self.delta_max = max(self.delta_max, float(np.abs(wanted).max(initial=0)))
        self.lost_max = max(self.lost_max, float(np.abs(lost).max(initial=0)))
        self._delta += float(np.square(wanted, dtype=np.float64).sum())
        self._lost += float(np.square(lost, dtype=np.float64).sum())

    @property
    def share(self) -> float:
        """‖lost‖ / ‖delta‖, Frobenius: 0 is nothing lost, 1 as if nothing had been merged; 0 for a zero delta."""
        return math.sqrt(self._lost / self._delta) if self._delta else 0.0

    @property
    def vanished(self) -> bool:
        """There was a delta, and not one value of the weight has moved."""
        return bool(self.delta_max) and not self.changed

    def as_json(self) -> dict[str, float | int]:
        return {
            "values": self.values, "changed": self.changed, "delta_max": self.delta_max,
            "lost_max": self.lost_max, "lost_share": self.share,
        }  # fmt: skip
