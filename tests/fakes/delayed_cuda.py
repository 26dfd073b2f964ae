"""A CUDA device whose copies start late, each stream by another time: what is only right by luck goes wrong here."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from adapterd.gpu_cache.cuda_device import CudaDevice
from adapterd.gpu_cache.cuda_driver import Driver
from adapterd.gpu_cache.device import Run, Stream


class DelayedCuda(CudaDevice):
    """A kernel spins in front of each batch of copies, for up to `cycles` of the GPU's clock, drawn from a seed."""

    def __init__(self, index: int = 0, driver: Driver | None = None, *, cycles: int = 2_000_000, seed: int = 0) -> None:
        super().__init__(index, driver)
        self.cycles, self._random = cycles, random.Random(seed)

    def copy_runs(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int
    ) -> None:
        assert isinstance(stream, int)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.name)):
            torch.cuda._sleep(self._random.choice((0, self.cycles // 8, self.cycles)))
        super().copy_runs(stream, dst, src, runs, page_bytes)
