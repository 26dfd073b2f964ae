"""The reference worker on the device: replayed steps give what launched ones give, whatever comes and goes."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapterd.cli.worker.graphs import Captured, CudaCapture, runner_for
from adapterd.cli.worker.kv import KeyValues
from adapterd.cli.worker.prefix import PrefixCache
from adapterd.cli.worker.rows import StepRows
from adapterd.cli.worker.sampling import Verdict
from adapterd.gpu_cache import Lease
from fakes.worker_play import Play, scheduler_of
from fakes.worker_world import ALL, WorkerWorld

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = "cuda:0"
ADAPTERS = 12
PROMPT = [3, 1, 4, 1, 5]


def graphs(most: int = 96) -> Captured:
    return Captured(CudaCapture(torch.device(CUDA)), most)


@pytest.mark.parametrize("captured", [True, False], ids=["graphs", "launched"])
@pytest.mark.parametrize("seed", range(4))
def test_each_request_gives_what_it_gives_alone_on_merged_weights(tmp_path: Path, seed: int, captured: bool) -> None:
    scheduler, runner = scheduler_of(seed), runner_for(torch.device(CUDA), graphs=captured)
    with WorkerWorld(
        tmp_path, device=CUDA, flat={"runner": runner}, scheduler=scheduler, prefix=PrefixCache(64)
    ) as world:
        play = Play(world, scheduler, seed)
        play.run()
        play.check()
        assert runner.counts.failed == 0 and (runner.counts.replayed > 0) == captured


class Both:
    """Steps of random rows that are run twice, launched and replayed, over few pages for many adapters."""

    def __init__(self, world: WorkerWorld, seed: int) -> None:
        self.world, self.random = world, random.Random(seed)
        self.kvs: list[KeyValues] = []
        for number in range(ADAPTERS):
            world.publisher.publish(
                "acme",
                f"a{number}",
                modules=ALL[: 1 + number % 7],
                rank=(1, 5, 16, 40)[number % 4],
                alpha=8,
                seed=number,
            )

    def leases(self, count: int) -> list[Lease | None]:
        """Of the base and of two adapters, others each time."""
        some = [-1, *self.random.sample(range(ADAPTERS), 2)]
        refs = [self.random.choice(some) for _ in range(count)]
        held = {ref: self.world.cache.acquire(f"acme/a{ref}", tenant="acme").wait(60) for ref in set(refs) if ref >= 0}
        return [held.get(ref) for ref in refs]

    def step(self, rows: int) -> None:
        """Each row a token of its own sequence; the same step many times, so that it is captured."""
        leases = self.leases(rows)
        self.kvs = [self.world.flat.key_values() for _ in range(rows)]
        ids = [[self.random.randrange(256)] for _ in range(rows)]
        wanted = self.run(ids, leases, graph=False)
        for _ in range(3):
            assert torch.equal(self.run(ids, leases, graph=True), wanted)
        for kv in self.kvs:
            kv.free()
        for lease in {id(lease): lease for lease in leases if lease is not None}.values():
            lease.release()

    def run(self, ids: list[list[int]], leases: list[Lease | None], *, graph: bool) -> Tensor:
        for kv in self.kvs:
            kv.reserve(1)
        plan: StepRows = self.world.flat.plan(list(zip(ids, self.kvs, strict=True)))
        entries = [(lease, 1) for lease in leases] + ([(None, plan.padding)] if plan.padding else [])
        with self.world.engine.step(entries) as step:  # type: ignore[arg-type]
            key = "base" if all(lease is None for lease in leases) else step.shape
            logits = self.world.flat.run(plan, key if graph else None).clone()
        for kv in self.kvs:
            kv.length -= 1
        return logits


def test_a_replayed_step_gives_the_bits_of_a_launched_one(tmp_path: Path) -> None:
    runner = graphs()
    with WorkerWorld(tmp_path, device=CUDA, flat={"runner": runner}) as world:
        both = Both(world, 1)
        for turn in range(60):
            both.step((1, 3, 8, 20, 64)[turn % 5])
        assert runner.counts.failed == 0 and runner.counts.replayed > runner.counts.captured > 4


def test_a_verdict_is_its_own_steps_though_the_next_step_is_under_way(tmp_path: Path) -> None:
    """Steps of different sizes and with prompts, by table and each apart; each verdict is waited for a step later."""
    runner = graphs()
    with WorkerWorld(tmp_path, device=CUDA, flat={"runner": runner, "most_rows": 64, "kv_blocks": 512}) as world:
        flat, chance = world.flat, random.Random(5)
        before: tuple[Verdict, Tensor] | None = None
        for turn in range(60):
            kvs = [flat.key_values() for _ in range((1, 5, 30, 70)[turn % 4])]
            sequences = [([chance.randrange(256) for _ in range(1 + (n == 0) * turn)], kv) for n, kv in enumerate(kvs)]
            for tokens, kv in sequences:
                kv.reserve(len(tokens))
            logits = flat.run(flat.plan(sequences), "base")
            now = flat.verdict(), logits.argmax(-1)
            if before is not None:
                verdict, largest = before
                said = verdict.wait()[: len(largest)]
                assert said == [(1, token) for token in largest.tolist()]
            before = now
            for kv in kvs:
                kv.free()
        assert runner.counts.failed == 0 and runner.counts.replayed > 0


def test_dropped_graphs_are_captured_again(tmp_path: Path) -> None:
    runner = graphs(most=2)
    with WorkerWorld(tmp_path, device=CUDA, flat={"runner": runner}) as world:
        both = Both(world, 2)
        for turn in range(30):
            both.step((1, 4, 16)[turn % 3])
        assert runner.counts.failed == 0 and runner.counts.captured > 6


def test_what_cannot_be_captured_is_launched_and_the_worker_goes_on(tmp_path: Path) -> None:
    """A module that asks the device: an error inside a capture, and none outside."""
    runner = graphs()
    with WorkerWorld(tmp_path, device=CUDA, flat={"runner": runner}) as world:
        handle = world.model.get_submodule("lm_head").register_forward_hook(
            lambda _m, _i, out: float(out.sum()) and None
        )
        world.check_greedy(PROMPT, world.answer(None, PROMPT, 20), ())
        assert runner.counts.failed > 0 and runner.counts.replayed == 0
        handle.remove()
        world.check_greedy(PROMPT, world.answer(None, PROMPT, 20), ())


def test_other_threads_use_the_device_during_a_capture(tmp_path: Path) -> None:
    """As loaders do: they allocate, copy and ask for events."""
    over = threading.Event()
    faults: list[RuntimeError] = []

    def busy() -> None:
        stream = torch.cuda.Stream(CUDA)
        try:
            while not over.is_set():
                with torch.cuda.stream(stream):
                    pinned = torch.empty(1 << 16, pin_memory=True)
                    pinned.to(CUDA, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                event.query()
                stream.synchronize()
        except RuntimeError as fault:
            faults.append(fault)

    thread = threading.Thread(target=busy)
    runner = graphs(most=1)
    with WorkerWorld(tmp_path, device=CUDA, flat={"runner": runner}) as world:
        thread.start()
        try:
            both = Both(world, 3)
            for turn in range(20):
                both.step((2, 8)[turn % 2])
        finally:
            over.set()
            thread.join()
    assert not faults
    assert runner.counts.failed == 0 and runner.counts.captured > 4
