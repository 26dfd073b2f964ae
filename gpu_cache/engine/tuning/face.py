"""What `adapterctl bench kernels` asks for: all workloads measured, or a table made, on one card."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adapterd.gpu_cache.engine.kernels.launch import shared_memory_of
from adapterd.gpu_cache.engine.kernels.tuned import Table
from adapterd.gpu_cache.engine.tuning.cases import Case
from adapterd.gpu_cache.engine.tuning.compiling import compilers
from adapterd.gpu_cache.engine.tuning.machine import Machine
from adapterd.gpu_cache.engine.tuning.measuring import Measured, WrongOutputError, measure
from adapterd.gpu_cache.engine.tuning.search import Card, Search, Tally
from adapterd.gpu_cache.engine.tuning.stand import NoStandError, Stand
from adapterd.gpu_cache.engine.tuning.timing import copy_rate
from adapterd.gpu_cache.engine.tuning.workloads import Workload
from adapterd.gpu_cache.engine.tuning.world import World
from adapterd.loader.errors import Code, Problem, reject
from adapterd.loader.scratch import scratch_folder


def rate_of(machine: Machine) -> float:
    """Bytes read and written a second by a copy on the card: what floors are made of."""
    return copy_rate(torch.device(machine.device))


def measured(
    machine: Machine, workloads: Sequence[Workload], rate: float, problems: list[Problem], **options: Any
) -> Iterator[Measured]:
    """A row for each workload that is right and fits onto the card; a problem for each that is not, or does not.

    Args:
        rate: bytes a second of a copy.
        options: of the engine.
    """
    torch.manual_seed(0)
    for workload in workloads:
        try:
            yield _measured(workload, machine, rate, options)
        except WrongOutputError as wrong:
            problems.append(reject(Code.INTERNAL, "kernels", str(wrong), "Do not serve with these kernels; tell us."))
        except torch.OutOfMemoryError:
            message = f"{workload.name}: more than the card's free memory"
            problems.append(reject(Code.DEVICE_ERROR, machine.device, message, "Give fewer rows or a smaller rank."))
        gc.collect()  # this one's gigabytes, before the next one's


def _measured(workload: Workload, machine: Machine, rate: float, options: Mapping[str, Any]) -> Measured:
    world = World(workload, machine.device)
    return measure(world, rate, world.once(kernels="reference"), **options)


@dataclass(frozen=True)
class Tuning:
    """What a search found.

    Attributes:
        kernels: that were compiled for it.
        seconds: it took.
    """

    table: Table
    tally: Tally
    kernels: int
    seconds: float


def tune(machine: Machine, cases: Sequence[Case], seconds: float, progress: Callable[[str], object]) -> Tuning:
    """Search configurations for `cases`, for about so many seconds: what is not reached by then is left out."""
    began = time.monotonic()
    card = Card(machine.pdl, shared_memory_of(torch.device(machine.device)))
    with (
        scratch_folder("tune") as folder,
        compilers(machine.target, folder) as pool,
    ):
        search = Search(
            card, pool,
            stand=lambda case: _stand(case, machine),
            out_of_time=lambda: time.monotonic() - began > seconds,
            progress=progress,
        )  # fmt: skip
        entries = tuple(search.run(cases))
        kernels = pool.count
    table = Table(machine.name, machine.torch, machine.triton, entries)
    return Tuning(table, search.tally, kernels, time.monotonic() - began)


def _stand(case: Case, machine: Machine) -> Stand:
    try:
        return Stand(case, machine.device, pdl=machine.pdl)
    except torch.OutOfMemoryError:
        raise NoStandError(f"{case.name}: more than the card's free memory") from None
