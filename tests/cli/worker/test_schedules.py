"""Whatever the schedule, each request gives what it gives alone on merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapterd.cli.worker.graphs import Captured
from adapterd.cli.worker.prefix import PrefixCache
from adapterd.loader.errors import Code
from fakes.repeated import OneShape, Repeated
from fakes.worker_play import Play, kinds, scheduler_of, selected
from fakes.worker_world import ALL, TOLERANCE, WorkerWorld

WAYS: dict[str, dict[str, Any]] = {
    "by table": {},
    "each apart": {"flat": {"most_rows": 0}},
    "some apart": {"flat": {"most_rows": 4}},
    "replayed": {"engine": OneShape},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(5))
def test_each_request_gives_what_it_gives_alone_on_merged_weights(tmp_path: Path, seed: int, way: str) -> None:
    scheduler, runner = scheduler_of(seed), Captured(Repeated(), most=3)
    flat = {**WAYS[way].get("flat", {}), "runner": runner if way == "replayed" else None}
    options = {**WAYS[way], "flat": flat, "scheduler": scheduler, "prefix": PrefixCache(64)}
    with WorkerWorld(tmp_path, **options) as world:
        play = Play(world, scheduler, seed)
        play.run()
        play.check()
        assert way != "replayed" or runner.counts.replayed > runner.counts.captured > 0


def test_the_adapters_of_the_schedules_change_what_is_said(tmp_path: Path) -> None:
    """Otherwise the test above would compare nothing."""
    with WorkerWorld(tmp_path) as world:
        prompt = list(range(1, 20))
        given = [tuple(world.logits(parts, prompt)[-1].tolist()) for _, parts in kinds(world)]
        for one in range(len(given)):
            for other in range(one):
                change = torch.tensor(given[one]) - torch.tensor(given[other])
                assert change.abs().max() > 100 * TOLERANCE


def test_seeded_sampling_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        world.publisher.publish("acme", "finance", modules=ALL, rank=5, alpha=10, seed=1)
        warm = {"temperature": 1.0, "seed": 3, "most": 12}
        alone = world.answer("acme/finance", [5, 6, 7], **warm)
        for number in range(4):
            world.ask(f"n{number}", None, range(number, 30), 12, temperature=0.7, seed=number)
        assert world.answer("acme/finance", [5, 6, 7], **warm) == alone
        assert world.answer("acme/finance", [5, 6, 7], most=12, temperature=1.0, seed=4) != alone
        assert world.answer("acme/finance", [5, 6, 7], most=12, temperature=1e-320) == world.answer(
            "acme/finance", [5, 6, 7], most=12
        )


def test_a_long_prompt_is_cut_into_steps_and_stalls_nobody(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, max_rows=16) as world:
        world.ask("short", None, [1, 2], 20)
        world.loop.step()
        world.ask("long", None, range(100), 3)
        world.run()
        world.check_greedy([1, 2], world.tokens("short"), ())
        world.check_greedy(range(100), world.tokens("long"), ())
        assert world.loop.statistics().steps <= 20  # a token of `short` in every one of them


def test_the_selector_bounds_keys_and_values_and_refuses_what_never_fits(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, scheduler=selected(kv_blocks=4)) as world:
        world.ask("huge", None, range(60), 5)  # 5 blocks
        for number in range(4):
            world.ask(f"r{number}", None, [number, 1], 30)  # 2 blocks each
        world.run(lambda: len(world.tokens("r0")) == 5)
        assert sum(bool(world.tokens(f"r{number}")) for number in range(4)) == 2
        world.run()
        assert world.ended("huge").problems[0].code is Code.BUDGET_EXCEEDED
        for number in range(4):
            world.check_greedy([number, 1], world.tokens(f"r{number}"), ())
            assert len(world.tokens(f"r{number}")) == 30
