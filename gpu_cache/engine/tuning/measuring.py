"""One workload as an engine runs it: checked against the reference, then timed over the floor in a replayed graph."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from adapterd.gpu_cache.engine.device_plan import LaunchShape, Regime
from adapterd.gpu_cache.engine.engine import LoRAEngine
from adapterd.gpu_cache.engine.kernels.configs import Configs, regime_of, spread
from adapterd.gpu_cache.engine.kernels.tuned import configs_for
from adapterd.gpu_cache.engine.tuning.cases import Case
from adapterd.gpu_cache.engine.tuning.stand import agrees
from adapterd.gpu_cache.engine.tuning.timing import graph_us, median
from adapterd.gpu_cache.engine.tuning.workloads import ITEM_BYTES, Workload
from adapterd.gpu_cache.engine.tuning.world import Lease, World

STEPS = 30


@dataclass(frozen=True, slots=True)
class Measured:
    """One workload on the card. Nothing of `cold_s` is in the other times.

    Attributes:
        us: a linear, in a replayed graph.
        floor_us: its fewest bytes at the rate of a copy.
        launch_us, step_us: CPU time of a linear launched from Python, and of opening a step.
        cold_s: the first step, with all that it compiles and loads.
        error: of the output against the reference's, relative.
        kernel: the regimes of the step.
        config: what the linear was launched with.
    """

    workload: Workload
    us: float
    floor_us: float
    launch_us: float
    step_us: float
    cold_s: float
    error: float
    kernel: str
    config: dict[str, int]

    @property
    def ratio(self) -> float:
        return self.us / self.floor_us

    def as_json(self) -> dict[str, Any]:
        one, steady = self.workload, ("us", "floor_us", "launch_us", "step_us", "error")
        return {
            "workload": one.name, "linear": one.linear.name, "rows": one.rows, "owners": one.owners, "rank": one.rank,
            **{name: getattr(self, name) for name in steady},
            "ratio": self.ratio, "kernel": self.kernel, "config": self.config, "cold_s": self.cold_s,
        }  # fmt: skip


class WrongOutputError(Exception):
    """The kernels do not give what the reference gives: nothing was timed."""


def measure(world: World, rate: float, wanted: Tensor, **options: Any) -> Measured:
    """Time `world` with an engine of these options.

    Args:
        rate: bytes a second of a copy.
        wanted: the reference's output, from `World.once`.

    Raises:
        WrongOutputError.
    """
    began = time.perf_counter()
    got = world.once(kernels="triton", strict=True, **options)
    cold = time.perf_counter() - began
    error = float((got - wanted).norm() / wanted.norm())
    if not agrees(got, wanted):
        raise WrongOutputError(f"{world.workload.name}: off by {error:.2g} of the reference's output")
    with world.engine(kernels="triton", strict=True, **options) as engine:
        with engine.step(world.rows) as step:
            us = graph_us(world.model) / world.sets
            began = time.perf_counter()
            world.model()
            launch = 1e6 * (time.perf_counter() - began) / world.sets
        opened = median([_step_us(engine, world) for _ in range(STEPS)])
    if step.shape is None:
        raise WrongOutputError(f"{world.workload.name}: no kernel ran")
    kernel = step.shape.regimes
    configs = configs_for(torch.cuda.get_device_name(world.cache.arena.device), options.get("tuning"))
    config = config_of(world.workload, step.shape, configs, batch_invariant=bool(options.get("batch_invariant")))
    floor = 1e6 * world.workload.nbytes() / rate
    return Measured(world.workload, us, floor, launch, opened, cold, error, kernel, config)


def _step_us(engine: LoRAEngine[Lease], world: World) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    with engine.step(world.rows):
        return 1e6 * (time.perf_counter() - began)


def config_of(workload: Workload, shape: LaunchShape, configs: Configs, *, batch_invariant: bool) -> dict[str, int]:
    """What a step of this shape launches the workload's linear with, and in which regime (its `tile_rows`)."""
    alone = Case(workload, Regime.ROWS)
    regime, tiled = shape.regime, shape.together
    if tiled is not None:
        regime = regime_of(alone.key, tiled.groups)
    key = Case(workload, regime).key
    if regime is Regime.ROWS:
        return {"tile_rows": 1, **asdict(configs.rows(key, ITEM_BYTES))}
    found = configs.tiles(key, ITEM_BYTES, batch_invariant=batch_invariant)
    if not batch_invariant:
        found = spread(found, key, (tiled or shape).groups)
    return {"tile_rows": (tiled or shape).tile_rows, **asdict(found)}
