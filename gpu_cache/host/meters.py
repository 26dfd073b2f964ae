"""How far the loads are that run: written by their jobs, read by whoever wants to know. No lock of the host's."""

from __future__ import annotations

from dataclasses import dataclass

from adapterd.gpu_cache.host.interface import Progress, Stage
from adapterd.loader.identity import VersionKey


@dataclass(eq=False, slots=True)
class Meter:
    """One load. Written by one thread."""

    key: VersionKey
    stage: Stage
    done: int = 0
    total: int = 0

    def add(self, nbytes: int) -> None:
        self.done += nbytes

    def expect(self, nbytes: int) -> None:
        """So many are to come, from the first one on."""
        self.done, self.total = 0, nbytes


class Meters:
    """Of all loads of a host. Each method is one operation on a dict, which threads may share."""

    def __init__(self) -> None:
        self._running: dict[int, Meter] = {}

    def begin(self, key: VersionKey, stage: Stage, total: int = 0) -> Meter:
        """A load runs from now on, until `end`."""
        meter = Meter(key, stage, total=total)
        self._running[id(meter)] = meter
        return meter

    def end(self, meter: Meter) -> None:
        del self._running[id(meter)]

    def rows(self) -> dict[VersionKey, Progress]:
        """As of now; of several loads of one version the latest."""
        return {m.key: Progress(m.stage, m.done, m.total) for m in list(self._running.values())}
