"""Whether a step would take a lease, asked of the engine once for each resident and not once for each request."""

from __future__ import annotations

from adapterd.gpu_cache import Lease
from adapterd.gpu_cache.engine import LoRAEngine

MOST = 4096
"""Residents that are remembered before all are forgotten."""


class Checked:
    """Remembers what the engine has passed: a slot's generation never comes back, and a reload ends all of them.

    A check is a step of the cache, with a mark on the device and copies behind it.
    """

    def __init__(self, engine: LoRAEngine[Lease | None]) -> None:
        self._engine = engine
        self._passed: set[tuple[int, int]] = set()

    def check(self, lease: Lease) -> None:
        """See `LoRAEngine.check`, of a lease that is ready."""
        if len(self._passed) >= MOST:
            self._passed.clear()
        residents = {(resident.slot, resident.generation) for resident, _ in lease.composition}
        if not residents or not residents <= self._passed:
            self._engine.check(lease)
            self._passed |= residents
