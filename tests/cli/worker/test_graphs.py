"""When work is captured, replayed and launched; that it is the same work is `test_schedules`' and the device's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from adapterd.cli.worker.graphs import MOST_FAILURES, Captured, GraphCounts, Work
from adapterd.loader.base_model import BaseSpec
from fakes.repeated import OneShape, Repeated
from fakes.worker_world import ALL, WorkerWorld

PROMPT = [3, 1, 4, 1, 5]


class Told:
    """Work that tells what was done; captured, `replay` is."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def capture(self, work: Work) -> Callable[[], object]:
        assert work == self.work
        return lambda: self.done.append("replay")

    def work(self) -> None:
        self.done.append("launch")


def test_the_second_time_is_captured_and_replayed_from_then_on() -> None:
    told = Told()
    runner = Captured(told.capture)
    for _ in range(4):
        runner.run("a", told.work)
    assert told.done == ["launch", "replay", "replay", "replay"]
    runner.run("b", told.work)
    runner.run(None, told.work)
    runner.run(None, told.work)
    assert told.done[4:] == ["launch"] * 3
    assert runner.counts == GraphCounts(captured=1, replayed=3, launched=4)


def test_the_graph_that_was_used_longest_ago_goes_first() -> None:
    told = Told()
    runner = Captured(told.capture, most=2)
    for key in ["a", "a", "b", "b", "a", "c", "c"]:  # b goes
        runner.run(key, told.work)
    captured = runner.counts.captured
    runner.run("a", told.work)
    assert runner.counts.captured == captured == 3
    runner.run("b", told.work)
    assert runner.counts.captured == captured + 1


def test_what_is_forgotten_is_not_replayed() -> None:
    told = Told()
    runner = Captured(told.capture)
    for _ in range(2):
        runner.run("a", told.work)
    runner.forget()
    runner.run("a", told.work)
    assert told.done == ["launch", "replay", "launch"]


def test_work_that_cannot_be_captured_is_launched_and_not_tried_again() -> None:
    told, tried = Told(), []

    def refuse(work: Work) -> Callable[[], object]:
        tried.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    runner = Captured(refuse)
    for key in range(MOST_FAILURES + 2):
        for _ in range(3):
            runner.run(key, told.work)
    assert told.done == ["launch"] * 3 * (MOST_FAILURES + 2)
    assert len(tried) == runner.counts.failed == MOST_FAILURES


@pytest.mark.parametrize("broken", [False, True])
def test_a_worker_answers_with_graphs_and_where_they_fail(tmp_path: Path, broken: bool) -> None:
    capture = Repeated()
    capture.broken = broken
    with WorkerWorld(tmp_path, flat={"runner": Captured(capture)}, engine=OneShape) as world:
        package = world.publisher.publish("acme", "finance", modules=ALL, rank=4, alpha=8, seed=1)
        world.check_greedy(PROMPT, world.answer("acme/finance", PROMPT, 40), [(package, 2.0, 1.0)])
        world.check_greedy(PROMPT, world.answer(None, PROMPT, 40), ())
        counts = world.loop.statistics().graphs
        assert (counts.failed > 0, counts.replayed > 60) == (broken, not broken)


def test_a_model_that_is_bound_anew_is_captured_anew(tmp_path: Path) -> None:
    """Its engine has other tables then, at other addresses."""
    with WorkerWorld(tmp_path, flat={"runner": Captured(Repeated())}) as world:
        for _ in range(2):  # prompt and tokens are graphs then
            world.answer(None, PROMPT, 20)
        captured = world.loop.statistics().graphs.captured
        world.answer(None, PROMPT, 20)
        assert world.loop.statistics().graphs.captured == captured > 0
        moved = BaseSpec.of(world.base.modules, id=world.base.id, revision="c" * 40)
        world.engine.rebind(world.model, moved)
        world.engine.rebind(world.model, world.base)
        for _ in range(2):
            world.check_greedy(PROMPT, world.answer(None, PROMPT, 20), ())
        assert world.loop.statistics().graphs.captured == 2 * captured


def test_a_step_whose_kernels_are_not_known_is_launched(tmp_path: Path) -> None:
    """The reference serves adapters on the CPU, and no graph can stand for it."""
    with WorkerWorld(tmp_path, flat={"runner": Captured(Repeated())}) as world:
        world.publisher.publish("acme", "finance", modules=ALL, rank=4, alpha=8, seed=1)
        world.answer("acme/finance", PROMPT, 20)
        counts = world.loop.statistics().graphs
        assert (counts.captured, counts.replayed) == (0, 0) and counts.launched >= 20
