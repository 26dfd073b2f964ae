"""A device that lags behind: who comes too soon for it waits, and nobody fails for that."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from adapterd.cli.worker.requests import Reason
from adapterd.cli.worker.tally import Progress
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.device_plan import LaunchShape
from adapterd.gpu_cache.engine.engine import Step
from adapterd.gpu_cache.engine.plan_ring import SLOTS, PlanRing
from adapterd.loader.errors import Code
from fakes.simulated import SimulatedEvent
from fakes.worker_world import WorkerWorld

PROMPT = [3, 1, 4, 1, 5]


class Lagging(LoRAEngine[Any]):
    """Its plans go through a ring, to a device that takes them when it is told to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ring, self.marks, self.lags = PlanRing(1, 1, 1, pinned=False), [SimulatedEvent()], False

    def step(self, rows: Iterable[tuple[Any, int]], *, shape: LaunchShape | None = None) -> Step[Any]:
        slot = self.ring.take()
        slot.sent = mark = SimulatedEvent()
        self.marks.append(mark)
        if not self.lags:
            self.catch_up()
        return super().step(rows, shape=shape)

    def catch_up(self) -> None:
        for mark in self.marks:
            mark.fire()


def test_who_comes_behind_forwards_that_failed_waits_until_the_device_has_their_plans(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, engine=Lagging) as world:
        wanted = world.answer(None, PROMPT, 4)
        assert isinstance(world.engine, Lagging)

        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        world.engine.lags = True
        handle = world.model.get_submodule("lm_head").register_forward_hook(fail)
        for number in range(SLOTS):
            world.ask(f"fails {number}", None, PROMPT, 4)
            world.run()
            assert world.ended(f"fails {number}").problems[0].code is Code.DEVICE_ERROR
        handle.remove()
        world.ask("late", None, PROMPT, 4)
        for _ in range(3):
            assert world.loop.step() is Progress.RAN
        assert world.events["late"] == []
        world.engine.catch_up()
        world.engine.lags = False
        world.run()
        assert world.ended("late").reason is Reason.LENGTH
        assert world.tokens("late") == wanted
