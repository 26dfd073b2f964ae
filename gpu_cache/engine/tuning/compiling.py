"""Compiles kernels ahead, in processes that need no card: what they leave in Triton's cache on disk, the caller finds.

Triton is told a target instead of asking a driver for it, so a process takes no memory of the card, and the rest is
the way of a launch: the caller's launch of the same constants is a hit.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterd.gpu_cache.engine.device_plan import Regime
from adapterd.gpu_cache.engine.kernels.grids import Launch

MOST_PROCESSES = 32


@dataclass(frozen=True)
class Job:
    """One kernel, by its name in `kernels`, and its constants."""

    kernel: str
    constants: Mapping[str, Any]

    @property
    def identity(self) -> object:
        return self.kernel, frozenset(self.constants.items())


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of a job.

    Attributes:
        shared_memory: bytes that a program takes.
        fault: why it does not compile, or nothing.
    """

    shared_memory: int = 0
    fault: str = ""


def jobs_of(launch: Launch, regime: Regime) -> tuple[Job, Job]:
    """(of `shrink`, of `expand`)."""
    return Job(f"shrink_{regime}", launch.shrink), Job(f"expand_{regime}", launch.expand)


class Compilers:
    """A pool of processes. Each kernel is compiled once, however often it is asked for.

    Args:
        capability: of the card, 90 for 9.0.
        processes: by default one a core.
    """

    def __init__(self, capability: int, processes: int | None = None) -> None:
        self._count = min(MOST_PROCESSES, processes or os.cpu_count() or 1)
        self._capability = capability
        self._futures: dict[object, Future[Compiled]] = {}
        self._pool = self._open()

    def _open(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._count, context, initializer=_begin, initargs=(self._capability,))

    def submit(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.identity not in self._futures:
                self._futures[job.identity] = self._submitted(job)

    def _submitted(self, job: Job) -> Future[Compiled]:
        try:
            return self._pool.submit(compile_kernel, job)
        except BrokenProcessPool:  # the compiler took its process down with it
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = self._open()
            return self._pool.submit(compile_kernel, job)

    def result(self, job: Job) -> Compiled:
        """Waits for it."""
        self.submit([job])
        try:
            return self._futures[job.identity].result()
        except BrokenProcessPool:
            return Compiled(fault="the compiler ended its process")

    @property
    def count(self) -> int:
        """Kernels that were asked for."""
        return len(self._futures)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def compilers(capability: int, folder: Path, processes: int | None = None) -> Iterator[Compilers]:
    """Compilers, and this process with them, whose cache is `folder`: the user's own is left alone."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    pool = Compilers(capability, processes)
    try:
        yield pool
    finally:
        pool.close()
        if before is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = before


# --- in the processes


class TargetOnly:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def _begin(capability: int) -> None:
    from triton.runtime import driver

    driver.set_active(TargetOnly(capability))


def compile_kernel(job: Job) -> Compiled:
    """Into the cache on disk. A kernel that the compiler refuses is an answer, not an error."""
    import torch

    from adapterd.gpu_cache.engine.kernels.expand import expand_rows, expand_tiles
    from adapterd.gpu_cache.engine.kernels.shrink import shrink_rows, shrink_tiles

    named = {kernel.__name__: kernel for kernel in (shrink_rows, shrink_tiles, expand_rows, expand_tiles)}
    kernel = named[job.kernel]
    types: dict[str, object] = dict.fromkeys(("items", "tiles", "parts", "order", "strips"), torch.int32)
    types |= dict.fromkeys(("scales", "planes", "weights"), torch.float32)
    types |= dict.fromkeys(("x", "y", "arena"), torch.bfloat16)
    types |= {"cells": torch.int64, "rows": 64}
    arguments = [types[name] for name in kernel.arg_names if name in types]
    try:
        done = kernel.warmup(*arguments, grid=(1,), **job.constants)
    except Exception as fault:  # noqa: BLE001 - whatever a compiler raises
        return Compiled(fault=f"{type(fault).__name__}: …{str(fault)[-400:]}")  # the cause stands last
    return Compiled(shared_memory=int(done.metadata.shared))
