"""The ranks of a tensor-parallel group as processes of a test, under a time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

Work = Callable[[int, int, str], dict[str, Any]]
"""(rank, size, device) → what the test looks at; a function of a module, for it goes to other processes."""


def run_ranks(
    work: Work, size: int, folder: Path, *, backend: str = "gloo", seconds: float = 200
) -> list[dict[str, Any]]:
    """What `work` returned on every rank.

    Raises:
        ProcessRaisedException: one of them raised; the others are ended.
        TimeoutError: some are not done in time; all are ended.
    """
    context = multiprocessing.spawn(_rank, (work, size, str(folder), backend, seconds), nprocs=size, join=False)
    try:
        end = time.monotonic() + seconds
        while not context.join(timeout=max(end - time.monotonic(), 0)):  # returns whenever one is done
            if time.monotonic() > end:
                raise TimeoutError(f"{size} ranks were not done after {seconds} seconds")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, work: Work, size: int, folder: str, backend: str, seconds: float) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=size,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    try:
        found = work(rank, size, device)
        torch.save(found, Path(folder) / f"rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
