"""What the host does in a step is bounded: rows that decode wait for all of it, whoever it is for."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adapterd.cli.worker.collector import YOUNG_OBJECTS, seldom_collected
from adapterd.cli.worker.generation import State
from adapterd.cli.worker.graphs import GraphCounts, Work
from adapterd.cli.worker.kv import BLOCK_TOKENS
from adapterd.cli.worker.requests import Reason
from adapterd.cli.worker.rows import ROW_BUCKETS, Bucket, lasts_of
from adapterd.cli.worker.scheduling import FirstComeFirstServed
from adapterd.gpu_cache import Lease
from adapterd.loader.base_model import BaseSpec
from fakes.worker_world import ALL, WorkerWorld

PROMPT = [3, 1, 4, 1, 5]


class Beside(TorchDispatchMode):
    """Counts what is launched beside the work that a graph stands for; a `graphs.Runner`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.launched, self._replaying = GraphCounts(), Counter[str](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._replaying:
            self.launched[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def run(self, key: Hashable | None, work: Work) -> None:
        """See `Runner`."""
        self._replaying = True
        work()
        self._replaying = False

    def forget(self) -> None:
        """See `Runner`."""


def launched_a_step(root: Path, requests: int) -> list[Counter[str]]:
    """By step, of requests that come together and take a new block together."""
    beside = Beside()
    with WorkerWorld(root, flat={"runner": beside}, scheduler=FirstComeFirstServed(seats=requests)) as world, beside:
        for number in range(requests):
            world.ask(f"r{number}", None, PROMPT, BLOCK_TOKENS)
        found = []
        for _ in range(BLOCK_TOKENS):
            beside.launched.clear()
            world.loop.step()
            found.append(beside.launched.copy())
        world.run()
        return found


def test_a_replayed_step_launches_as_much_beside_its_graph_for_many_sequences_as_for_few(tmp_path: Path) -> None:
    few, many = launched_a_step(tmp_path / "few", 2), launched_a_step(tmp_path / "many", 12)
    assert few == many
    assert max(each["aten.index_fill_.int_Scalar"] for each in many) == 1
    assert sum("zero_" in name for each in many for name in each) == 0


def counted(world: WorkerWorld, name: str) -> list[object]:
    """What a method of the engine or the cache gives from now on."""
    owner: Any = world.engine if hasattr(world.engine, name) else world.cache
    inner, given = getattr(owner, name), []

    def outer(*args: Any, **more: Any) -> Any:
        given.append(inner(*args, **more))
        return given[-1]

    setattr(owner, name, outer)
    return given


def publish(world: WorkerWorld, count: int) -> None:
    for number in range(count):
        world.publisher.publish("acme", f"a{number}", modules=ALL, rank=4, alpha=8, seed=number)


def test_the_engine_is_asked_once_about_a_resident(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        publish(world, 2)
        checks = counted(world, "check")
        both = (("acme/a0", 1.0), ("acme/a1", 0.5))
        for wish, asked in (("acme/a0", 1), ("acme/a0", 1), (both, 2), ("acme/a1", 2), (both, 2)):
            world.answer(wish, PROMPT, 2)  # type: ignore[arg-type]
            assert len(checks) == asked


def test_the_engine_is_asked_again_once_it_is_bound_anew(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path) as world:
        publish(world, 1)
        checks = counted(world, "check")
        world.answer("acme/a0", PROMPT, 2)
        world.engine.rebind(world.model, BaseSpec.of(world.base.modules, id=world.base.id, revision="c" * 40))
        world.engine.rebind(world.model, world.base)
        world.answer("acme/a0", PROMPT, 2)
        assert len(checks) == 2


def cold_a_step(world: WorkerWorld, until: Callable[[], bool]) -> list[int]:
    """How many leases were asked for in each step that were not ready at once."""
    found = []
    leases = counted(world, "acquire")
    inner = world.cache.acquire

    def acquire(*args: Any, **more: Any) -> Lease:
        lease = inner(*args, **more)
        cold[0] += not lease.ready
        return lease

    world.cache.acquire = acquire  # type: ignore[method-assign]
    while not until():
        cold = [0]
        world.loop.step()
        found.append(cold[0])
    assert leases
    return found


def test_adapters_that_have_to_come_are_sent_for_one_a_step_while_others_stand_ready(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, scheduler=FirstComeFirstServed(seats=1, ahead=8)) as world:
        publish(world, 6)
        world.answer("acme/a0", PROMPT, 2)
        for number in range(2):
            world.ask(f"warm{number}", "acme/a0", PROMPT, 40)
        world.run(lambda: world.loop.statistics().open[State.READY] == 2)
        for number in range(1, 6):
            world.ask(f"cold{number}", f"acme/a{number}", PROMPT, 2)
        found = cold_a_step(world, lambda: len(world.tokens("warm0")) == 35)
        assert sum(found) == 5 and max(found) == 1
        world.run()
        assert all(len(world.tokens(f"cold{number}")) == 2 for number in range(1, 6))


def test_who_ends_before_its_turn_is_not_sent_for(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, scheduler=FirstComeFirstServed(seats=1, ahead=8)) as world:
        publish(world, 4)
        world.answer("acme/a0", PROMPT, 2)
        for number in range(2):
            world.ask(f"warm{number}", "acme/a0", PROMPT, 40)
        world.run(lambda: world.loop.statistics().open[State.READY] == 2)
        leases = counted(world, "acquire")
        for number in range(1, 4):
            world.ask(f"cold{number}", f"acme/a{number}", PROMPT, 2)
        world.loop.step()
        world.loop.cancel("cold3")
        world.loop.pause("cold2")
        world.run(lambda: not world.loop.statistics().open[State.READY])
        assert len(leases) == 1
        world.loop.resume("cold2")
        world.run()
        assert len(leases) == 2 and world.ended("cold3").reason is Reason.CANCELLED
        assert [len(world.tokens(f"cold{number}")) for number in range(1, 4)] == [2, 2, 0]


def test_nobody_holds_them_up_where_no_other_stands_ready(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, scheduler=FirstComeFirstServed(seats=8, ahead=8)) as world:
        publish(world, 6)
        world.answer("acme/a0", PROMPT, 2)
        world.ask("warm", "acme/a0", PROMPT, 40)
        world.run(lambda: bool(world.tokens("warm")))
        for number in range(1, 6):
            world.ask(f"cold{number}", f"acme/a{number}", PROMPT, 2)
        assert cold_a_step(world, lambda: len(world.tokens("warm")) == 3)[0] == 5
        world.run()


def test_a_step_says_something_of_all_its_rows_or_of_half_of_them() -> None:
    for rows in ROW_BUCKETS:
        for sequences in range(1, rows + 1):
            assert sequences <= lasts_of(Bucket(rows, 16), sequences) in {rows, rows // 2}
    assert lasts_of(Bucket(128, 16), 64) == 64


# The collector of cycles


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_a_busy_loop_does_not_wake_the_collector(tmp_path: Path) -> None:
    with WorkerWorld(tmp_path, scheduler=FirstComeFirstServed(seats=32, ahead=32)) as world:
        publish(world, 2)
        world.answer("acme/a0", PROMPT, 2)
        with seldom_collected():
            before = collections()
            for number in range(150):
                world.ask(f"r{number}", f"acme/a{number % 2}", list(range(20)), 3)
            world.run()
            assert collections() == before


@pytest.mark.parametrize("before", [(700, 10, 10), (10 * YOUNG_OBJECTS, 5, 5), (0, 10, 10)])
def test_the_collector_is_as_it_was_when_the_worker_ends(before: tuple[int, int, int]) -> None:
    """Who has switched it off, or wants it to come even more seldom, knows why."""
    found = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        with pytest.raises(RuntimeError), seldom_collected():
            assert gc.get_freeze_count() > 0
            assert gc.get_threshold() == (before[0] and max(before[0], YOUNG_OBJECTS), *before[1:])
            raise RuntimeError
        assert gc.get_threshold() == before and gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*found)


def test_what_was_put_aside_before_stays_so() -> None:
    """By whoever this process was forked from, or by another worker in it: within one, say."""
    with seldom_collected():
        aside = gc.get_freeze_count()
        with seldom_collected():
            pass
        assert gc.get_freeze_count() >= aside > 0
    assert gc.get_freeze_count() == 0


def test_cycles_are_collected_all_the_same() -> None:
    with seldom_collected():
        before = collections()
        kept = []
        for _ in range(2 * YOUNG_OBJECTS):
            kept.append([kept])
        assert collections() > before


def test_blocks_are_zeroed_however_many_are_fresh(tmp_path: Path) -> None:
    """More than go along with a step's numbers; and no block of another sequence."""
    with WorkerWorld(tmp_path, flat={"kv_blocks": 700}) as world:
        own, many = world.flat.key_values(), world.flat.key_values()
        own.reserve(BLOCK_TOKENS)
        world.flat._pool.clear()
        for group in world.flat._pool.groups:
            group.fill_(float("nan"))
            group[:, 0] = 0
        many.reserve(600 * BLOCK_TOKENS)
        world.check_greedy(PROMPT, world.answer(None, PROMPT, 20), ())
        for group in world.flat._pool.groups:
            assert torch.isnan(group[:, own.blocks]).all() and not group[:, many.blocks].any()
        own.free()
        many.free()
